// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/metrics"
)

// TestRoleWithoutPermissions: in "all", the provisioner may not list and watch PersistentVolumeClaims. It is
// disabled and the attacher works, until the permission is granted. A provisioner that is named ends the process.
func TestRoleWithoutPermissions(t *testing.T) {
	cp := kubetest.Get(t, kubetest.Real())
	for name, args := range map[string][]string{
		"not named": nil,
		"named":     {"--controllers=provisioner,attacher"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			user := kubetest.Namespace(t, cp) // a unique name
			plugin := csitest.Run(t, csitest.Config{Name: user + ".example.com"})
			grantFile(t, cp, user, "attacher")
			ctx, drain := context.WithCancelCause(t.Context())
			defer drain(nil)
			terms := termsOf(t, cp, user, append(args, "--csi-address="+plugin.Address()))
			done := make(chan error, 1)
			go func() { done <- terms.run(ctx) }()

			if args != nil {
				if err := <-done; err == nil || !strings.Contains(err.Error(), "persistentvolumeclaims") {
					t.Errorf("got %v, want an error that names the kind", err)
				}
				return
			}
			kubetest.Eventually(t, "the provisioner is disabled with a warning", func(context.Context) error {
				err := terms.rolesReady()
				var warning metrics.Warning
				if !errors.As(err, &warning) || !strings.Contains(err.Error(), "provisioner is disabled: ") ||
					!strings.Contains(err.Error(), "persistentvolumeclaims") {
					return fmt.Errorf("got %w", err)
				}
				return nil
			})
			attacher, provisioner := memberOf(terms, attacherName), memberOf(terms, provisionerName)
			<-attacher.synced
			if reason := attacher.disabled(); reason != "" || terms.synced() != nil {
				t.Errorf("the attacher is disabled: %q; the informers: %v", reason, terms.synced())
			}
			grantFile(t, cp, user, "provisioner")
			<-provisioner.synced
			if err := errors.Join(terms.rolesReady(), terms.synced()); err != nil || len(done) > 0 {
				t.Errorf("after the permission was granted: %v", err)
			}
			drain(workloop.ErrDrain)
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// termsOf builds the roles of "all" with the permissions of user and short limits.
func termsOf(t *testing.T, cp *kubetest.ControlPlane, user string, args []string) *terms {
	t.Helper()
	p := newProcess(configOf(t, All, args...).Enabled())
	if err := p.connect(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.csi.Close() })
	services, stopServices := context.WithCancel(context.WithoutCancel(t.Context()))
	terms, err := p.build(t.Context(), services, cp.UserConfig(t, user))
	if err != nil {
		stopServices()
		t.Fatal(err)
	}
	t.Cleanup(terms.stop)
	t.Cleanup(stopServices)
	terms.limit, terms.retry.Duration, terms.retry.Factor = 5*time.Second, 100*time.Millisecond, 1
	return terms
}

// memberOf returns the role called name.
func memberOf(t *terms, name string) *member {
	for _, m := range t.members() {
		if m.name == name {
			return m
		}
	}
	return nil
}

// grantFile gives user the rules of a directory of deploy/rbac.
func grantFile(t *testing.T, cp *kubetest.ControlPlane, user, file string) {
	t.Helper()
	var rules []rbacv1.PolicyRule
	for _, a := range rbac.Of(file, "") {
		rules = append(rules, a.Rule())
	}
	subject := rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: user}
	grant(t, cp.Client(), user+"-"+file, subject, rules...)
}
