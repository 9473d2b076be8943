// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"time"

	"github.com/storage-controller/storage-controller/internal/tools/audit"
)

const auditName = "audit"

// auditSettle is the time between the two comparisons of a periodic audit.
const auditSettle = time.Minute

// buildAudit creates the periodic audit, which runs in the terms of the provisioner. It reads only kinds that the
// roles watch, and makes no requests to the API server.
func (b *builder) buildAudit(provisioner *member) (controller, error) {
	if provisioner.controller == nil {
		return nil, errors.New("the provisioner does not run")
	}
	c := b.process.Config
	cfg := audit.DefaultConfig()
	cfg.Timeout, cfg.MaxEntries = provisionerConfig(c.Settings).Timeout, attacherConfig(c.Settings).MaxEntries
	cfg.Settle = min(auditSettle, c.Common.AuditInterval)
	s := b.shared
	informers := s.informers.For(auditName)
	cached := audit.CacheReader{Driver: s.driver.Name, Volumes: informers.Volumes(), Claims: informers.Claims()}
	if s.driver.Controller.PublishUnpublishVolume {
		attachments := informers.Attachments()
		cached.Attachments = &attachments
	}
	if s.running.attacher.Load() != nil {
		nodes := informers.CSINodes()
		cached.Nodes = &nodes
	}
	if s.service != nil {
		cached.LogicalVolumes = s.service.LogicalVolumes
	}
	auditor := audit.Auditor{Config: cfg, Driver: s.driver, CSI: s.csi.Controller(), LogicalVolumes: s.service != nil, Read: cached.Read}
	return audit.NewController(auditor, c.Common.AuditInterval, s.csi.WaitReady, b.process.registries.of(provisionerName))
}

// validateAudit returns the error in the settings of the periodic audit.
func (c Config) validateAudit() error {
	switch interval := c.Common.AuditInterval; {
	case interval < 0:
		return fmt.Errorf("--audit-interval: must not be negative, got %v", interval)
	case interval > 0 && c.perNode(c.roles):
		return errors.New("--audit-interval and --node-deployment: only one of them may be set, because the instance of a node " +
			"knows only its own volumes")
	}
	return nil
}

// AuditConfig returns cfg with the settings that the audit shares with the attacher, and the error in all settings of an audit.
func (c Config) AuditConfig(cfg audit.Config) (audit.Config, error) {
	var perNode error
	if c.perNode(c.roles) {
		perNode = errors.New("--node-deployment: the instance of a node lists only its own volumes. An audit needs those of all nodes")
	}
	cfg.Timeout, cfg.MaxEntries = attacherConfig(c.Settings).Timeout, attacherConfig(c.Settings).MaxEntries
	return cfg, errors.Join(perNode, cfg.Validate(), c.DriverConfig().Validate())
}
