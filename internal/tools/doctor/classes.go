// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// checkClasses checks the StorageClasses of the driver and their secrets.
func (e *examination) checkClasses(ctx context.Context) {
	const name = "storageclasses"
	query := apiread.Query{Topic: name, What: "StorageClasses"}
	all := apiread.List[*storagev1.StorageClass](ctx, e.reader, query, e.Kubernetes.StorageV1().StorageClasses().List)
	if !all.Found {
		return
	}
	var found []string
	classes := slices.DeleteFunc(slices.Clone(all.Value), func(c *storagev1.StorageClass) bool {
		return c.Provisioner != e.driver.Name && c.Provisioner != migration.PluginOf(e.driver.Name)
	})
	for _, c := range classes {
		found = append(found, c.Name)
	}
	if found == nil {
		e.add(name, finding.Warning, "create one with provisioner: "+e.driver.Name, "no StorageClass has provisioner %s", e.driver.Name)
		return
	}
	e.ok(name, "%s", kube.ShortList(found, maxNames))
	for _, c := range classes {
		e.checkSecrets(ctx, c)
	}
}

func (e *examination) checkSecrets(ctx context.Context, class *storagev1.StorageClass) {
	secrets, err := volumerules.SecretTemplates(class.Parameters)
	if err != nil {
		e.add("storageclass "+class.Name, finding.Failing, "correct the parameters; no volume of this class can be provisioned", "%v", err)
		return
	}
	for _, s := range secrets {
		if role := reader(s.Purpose, e.driver.Controller, e.known); role != "" && e.plan.runs(role) {
			e.checkSecretAccess(ctx, s, role)
		}
		e.checkSecretExists(ctx, "StorageClass "+class.Name, s)
	}
}

// reader returns the role that reads the secrets of a purpose, "" if none does. known reports whether caps are known.
func reader(purpose volumerules.Purpose, caps csiclient.ControllerCapabilities, known bool) string {
	modifies := !known || caps.ModifyVolume
	switch purpose {
	case volumerules.Provisioner:
		return "provisioner"
	case volumerules.ControllerPublish:
		return "attacher"
	case volumerules.ControllerExpand:
		if modifies || caps.ExpandVolume {
			return "resizer"
		}
	case volumerules.ControllerModify:
		if modifies {
			return "resizer"
		}
	}
	return ""
}

// has reports whether there is a check called name.
func (r *Report) has(name string) bool {
	return slices.ContainsFunc(r.Findings, func(c finding.Finding) bool { return c.Topic == name })
}

// checkSecretAccess checks the permission to read a secret, or all secrets if it is a template.
func (e *examination) checkSecretAccess(ctx context.Context, s volumerules.Secret, role string) {
	a := rbac.Access{Verb: "get", Resource: "secrets", Namespace: s.Namespace, Name: s.Name}
	if strings.Contains(s.Name, "$") {
		a.Name = ""
	}
	if strings.Contains(s.Namespace, "$") {
		a.Namespace = ""
	}
	file := role + "-secrets"
	name := fmt.Sprintf("rbac %s %s/%s", file, s.Namespace, s.Name)
	if e.has(name) {
		return
	}
	client, err := e.reviewClient()
	if err == nil {
		err = rbac.Review(ctx, client, []rbac.Access{a})[a]
	}
	switch {
	case err == nil:
		e.ok(name, "granted")
	case !errors.Is(err, rbac.ErrDenied):
		e.unknown(name, "checking permission to %s: %v", a, err)
	case a.Namespace == "":
		e.add(name, finding.Warning, "apply deploy/rbac/"+file+"/rbac.yaml, or create a Role in each of these namespaces",
			"not granted in all namespaces: the %s reads secrets in the namespaces that the template gives", role)
	default:
		grant := rbac.Grant{File: strings.TrimSuffix(file+":"+a.Name, ":"), Accesses: []rbac.Access{a}}
		e.Missing = append(e.Missing, Missing{grant, a.String()})
		severity := finding.Failing
		if role == "resizer" && !e.known { // the driver may not expand volumes
			severity = finding.Warning
		}
		e.add(name, severity, "apply deploy/rbac/"+file+"/rbac.yaml, or create a Role in namespace "+s.Namespace,
			"not granted: %s; the %s needs it", a, role)
	}
}

// checkSecretExists reads only the metadata of a secret. Templates are not checked.
func (e *examination) checkSecretExists(ctx context.Context, class string, s volumerules.Secret) {
	name := fmt.Sprintf("secret %s/%s", s.Namespace, s.Name)
	if strings.Contains(s.Name+s.Namespace, "$") || e.has(name) {
		return
	}
	secret := volumerules.Secrets{Provisioner: &corev1.SecretReference{Namespace: s.Namespace, Name: s.Name}}
	if err := secret.Permitted(e.plan.SecretNamespaces); err != nil {
		e.add(name, finding.Failing, "add the namespace, or correct the parameters of the class", "%v; it is the %s secret of %s", err,
			s.Purpose, class)
		return
	}
	query := apiread.Query{Topic: name, What: apiread.Name("Secret", s.Namespace, s.Name),
		Effect: fmt.Sprintf("It is the %s secret of %s.", s.Purpose, class)}
	secrets := e.Metadata.Resource(corev1.SchemeGroupVersion.WithResource("secrets")).Namespace(s.Namespace)
	switch read := apiread.Get(ctx, e.reader, query, s.Name, apiread.Metadata(secrets)); {
	case read.Missing:
		e.add(name, finding.Warning, "create it, or correct the parameters of the class", "not found; it is the %s secret of %s",
			s.Purpose, class)
	case read.Found:
		e.ok(name, "exists, %s secret of %s", s.Purpose, class)
	}
}
