// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"errors"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Config holds the settings of the service.
type Config struct {
	// Driver is the name of the driver: [Driver] or [LegacyDriver].
	Driver string
	// Version is the vendor version that GetPluginInfo returns.
	Version string
	// Minimum holds the smallest sizes of volumes.
	Minimum Minimum
}

// Minimum holds the smallest sizes in bytes of block volumes and of file systems. Zero and negative sizes mean none.
type Minimum struct{ Block, Ext4, XFS, Btrfs int64 }

// DefaultConfig returns the default settings, without a version.
func DefaultConfig() Config {
	return Config{Driver: Driver, Minimum: Minimum{Block: 8 << 20, Ext4: 32 << 20, XFS: 300 << 20, Btrfs: 200 << 20}}
}

// Validate returns all errors in c.
func (c Config) Validate() error {
	var errs []error
	if problems := validation.IsDNS1123Subdomain(c.Driver); len(problems) > 0 || !strings.Contains(c.Driver, ".") {
		errs = append(errs, fmt.Errorf("driver: must be the group of a custom resource, such as %s, got %q", Driver, c.Driver))
	}
	if c.Version == "" {
		errs = append(errs, errors.New("version: must not be empty"))
	}
	return errors.Join(errs...)
}
