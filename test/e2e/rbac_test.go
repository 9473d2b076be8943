// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// permission is what one rule of RBAC grants: a verb on a resource.
type permission struct{ verb, group, resource string }

// applyRBAC creates what directories of deploy/rbac hold, for a ServiceAccount of the
// namespace of e and under names of its own, and returns what they grant.
func (e *env) applyRBAC(pattern string) map[permission]bool {
	e.t.Helper()
	must := func(err error) {
		e.t.Helper()
		if err != nil {
			e.t.Fatal(err)
		}
	}
	files, err := filepath.Glob(filepath.Join("../../deploy/rbac", pattern, "rbac.yaml"))
	must(err)
	if len(files) == 0 {
		e.t.Fatalf("no directory of deploy/rbac is called %s", pattern)
	}
	granted := map[permission]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(err)
		for doc := range strings.SplitSeq(string(text), "\n---\n") {
			must(e.applyDocument([]byte(doc), granted))
		}
	}
	return granted
}

func (e *env) applyDocument(doc []byte, granted map[permission]bool) error {
	var meta metav1.TypeMeta
	if err := yaml.Unmarshal(doc, &meta); err != nil {
		return err
	}
	ctx, rbac := e.t.Context(), e.client.RbacV1()
	own := func(name string) string { return name + "-" + e.ns }
	var err error
	switch meta.Kind {
	case "ServiceAccount":
	case "ClusterRole":
		var r rbacv1.ClusterRole
		if err = yaml.UnmarshalStrict(doc, &r); err == nil {
			note(granted, r.Rules)
			r.Name = own(r.Name)
			_, err = rbac.ClusterRoles().Create(ctx, &r, metav1.CreateOptions{})
		}
	case "Role":
		var r rbacv1.Role
		if err = yaml.UnmarshalStrict(doc, &r); err == nil {
			note(granted, r.Rules)
			r.Namespace = e.ns
			_, err = rbac.Roles(e.ns).Create(ctx, &r, metav1.CreateOptions{})
		}
	case "ClusterRoleBinding":
		var b rbacv1.ClusterRoleBinding
		if err = yaml.UnmarshalStrict(doc, &b); err == nil {
			b.Name, b.RoleRef.Name, b.Subjects[0].Namespace = own(b.Name), own(b.RoleRef.Name), e.ns
			_, err = rbac.ClusterRoleBindings().Create(ctx, &b, metav1.CreateOptions{})
		}
	case "RoleBinding":
		var b rbacv1.RoleBinding
		if err = yaml.UnmarshalStrict(doc, &b); err == nil {
			b.Namespace, b.Subjects[0].Namespace = e.ns, e.ns
			if b.RoleRef.Kind == "ClusterRole" {
				b.RoleRef.Name = own(b.RoleRef.Name)
			}
			_, err = rbac.RoleBindings(e.ns).Create(ctx, &b, metav1.CreateOptions{})
		}
	default:
		err = fmt.Errorf("kind %q is not expected here", meta.Kind)
	}
	return err
}

// note adds what rules grant: true if for objects of any name.
func note(granted map[permission]bool, rules []rbacv1.PolicyRule) {
	for _, r := range rules {
		for _, g := range r.APIGroups {
			for _, resource := range r.Resources {
				for _, v := range r.Verbs {
					p := permission{v, g, resource}
					granted[p] = granted[p] || len(r.ResourceNames) == 0
				}
			}
		}
	}
}

// asked is the permission that a request needs; false for those of discovery.
func asked(r *http.Request) (permission, bool) {
	path := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	p := permission{}
	switch {
	case path[0] == "api" && len(path) > 2:
		path = path[2:]
	case path[0] == "apis" && len(path) > 3:
		p.group, path = path[1], path[3:]
	default:
		return p, false
	}
	if path[0] == "namespaces" && len(path) > 2 {
		path = path[2:]
	}
	p.resource = path[0]
	if len(path) > 2 {
		p.resource += "/" + path[2]
	}
	p.verb = map[string]string{http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete",
		http.MethodGet: "get"}[r.Method]
	if p.verb == "get" && len(path) == 1 {
		p.verb = "list"
		if r.URL.Query().Get("watch") != "" {
			p.verb = "watch"
		}
	}
	return p, true
}

// statusWriter keeps the code of an answer.
type statusWriter struct {
	http.ResponseWriter
	code int
}

func (w *statusWriter) WriteHeader(code int) { w.code = code; w.ResponseWriter.WriteHeader(code) }

// Unwrap lets the proxy flush what a watch sends.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// as is the path of a kubeconfig for a ServiceAccount of the namespace, and what it used
// and what it was refused.
func (e *env) as(account string) (kubeconfig string, used, refused func() []permission) {
	var mu sync.Mutex
	all, no := map[permission]bool{}, map[permission]bool{}
	cfg := e.cp.UserConfig(e.t, "system:serviceaccount:"+e.ns+":"+account, "system:serviceaccounts")
	proxy := kubetest.Proxy(e.t, cfg, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		p, counts := asked(r)
		if counts { // at once: a watch does not end
			mu.Lock()
			all[p] = true
			mu.Unlock()
		}
		status := &statusWriter{ResponseWriter: w}
		pass.ServeHTTP(status, r)
		if status.code == http.StatusForbidden {
			mu.Lock()
			no[p] = true
			mu.Unlock()
		}
	})
	list := func(m map[permission]bool) func() []permission {
		return func() []permission {
			mu.Lock()
			defer mu.Unlock()
			return slices.Collect(maps.Keys(m))
		}
	}
	return kubetest.WriteKubeconfig(e.t, proxy), list(all), list(no)
}

// TestProvisionerNeedsWhatItsManifestsGrant uses every feature as the ServiceAccount of
// deploy/rbac: it is refused nothing, and nothing is granted that it does not use.
func TestProvisionerNeedsWhatItsManifestsGrant(t *testing.T) {
	t.Parallel()
	all := []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
	}
	e := newEnv(t, csitest.Config{Controller: all, Segments: []map[string]string{{}}}, 1)
	kubetest.InstallCRDs(t, e.cp)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	granted := e.applyRBAC("provisioner*")
	kubeconfig, used, refused := e.as("csi-provisioner")
	_, err := e.client.CoreV1().Secrets(e.ns).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}},
		metav1.CreateOptions{})
	must(err)
	_, err = e.client.StorageV1().VolumeAttributesClasses().Create(t.Context(), &storagev1.VolumeAttributesClass{
		ObjectMeta: metav1.ObjectMeta{Name: e.ns}, DriverName: e.plugin.Name(), Parameters: map[string]string{"iops": "9"},
	}, metav1.CreateOptions{})
	must(err)
	e.inForce("csi-provisioner", granted)
	e.run("provision", append(slices.Clone(quick), "--kubeconfig", kubeconfig, "--leader-election",
		"--feature-gates=CrossNamespaceVolumeDataSource=true")...)

	class := e.class(false, func(c *storagev1.StorageClass) {
		c.Parameters = map[string]string{"csi.storage.k8s.io/provisioner-secret-name": "s",
			"csi.storage.k8s.io/provisioner-secret-namespace": e.ns}
	})
	// While the outcome is unknown, the claim is protected. The first event says that it will be; the third has the text of the second,
	// and is a patch of it.
	pending := csitest.Fail(codes.Aborted, "pending")
	e.plugin.Next("CreateVolume", pending, pending, pending)
	e.claim("source", class)
	e.snapshot(e.bound("source"))
	named := func(name string, change func(*corev1.PersistentVolumeClaim)) {
		c := newClaim(name, class)
		change(c)
		e.make(c)
	}
	named("clone", func(c *corev1.PersistentVolumeClaim) {
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: kube.KindClaim, Name: "source"}
	})
	named("restored", func(c *corev1.PersistentVolumeClaim) {
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ptr.To("snapshot.storage.k8s.io"), Kind: kube.KindSnapshot,
			Name: "snap"}
	})
	named("attributes", func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeAttributesClassName = &e.ns })
	elsewhere := kubetest.Namespace(t, e.cp)
	foreign := newClaim("c", class)
	foreign.Spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: ptr.To("snapshot.storage.k8s.io"), Kind: kube.KindSnapshot,
		Name: "snap", Namespace: &e.ns}
	_, err = e.client.CoreV1().PersistentVolumeClaims(elsewhere).Create(t.Context(), foreign, metav1.CreateOptions{})
	must(err)
	grant := fmt.Appendf(nil, `{"apiVersion":"gateway.networking.k8s.io/v1beta1","kind":"ReferenceGrant","metadata":{"name":"g"},"spec":{
		"from":[{"group":"","kind":"PersistentVolumeClaim","namespace":%q}],"to":[{"group":"snapshot.storage.k8s.io","kind":"VolumeSnapshot"}]}}`, elsewhere)
	must(e.client.Discovery().RESTClient().Post().AbsPath("/apis/gateway.networking.k8s.io/v1beta1/namespaces/"+e.ns+"/referencegrants").
		SetHeader("Content-Type", "application/json").Body(grant).Do(t.Context()).Error())
	for _, name := range []string{"clone", "restored", "attributes"} {
		e.bound(name)
	}
	e.eventually("the claim of the other namespace is bound", func(ctx context.Context) error {
		c, err := e.client.CoreV1().PersistentVolumeClaims(elsewhere).Get(ctx, "c", metav1.GetOptions{})
		if err == nil && c.Status.Phase != corev1.ClaimBound {
			err = fmt.Errorf("it is %s", c.Status.Phase)
		}
		return err
	})
	e.agrees(5)
	must(e.client.CoreV1().PersistentVolumeClaims(elsewhere).Delete(t.Context(), "c", metav1.DeleteOptions{}))
	e.leftovers("source", "clone", "restored", "attributes")

	e.usesAll(granted, used, refused, func(p permission) bool {
		return p.verb == "list" // of a server that cannot send it with the watch
	})
}

// usesAll waits until everything that is granted was used, and fails the test when
// anything was refused. rare lists permissions for cases that do not happen here.
func (e *env) usesAll(granted map[permission]bool, used, refused func() []permission, rare func(permission) bool) {
	e.t.Helper()
	e.eventually("everything that is granted is used", func(context.Context) error {
		unused := maps.Clone(granted)
		for _, p := range used() {
			delete(unused, p)
		}
		delete(unused, permission{"watch", "coordination.k8s.io", "leases"}) // of a standby
		maps.DeleteFunc(unused, func(p permission, _ bool) bool { return rare(p) })
		if len(unused) > 0 {
			return fmt.Errorf("not used: %v", slices.Collect(maps.Keys(unused)))
		}
		return nil
	})
	if no := refused(); len(no) > 0 {
		e.t.Errorf("refused: %v", no)
	}
	for _, p := range used() {
		if _, is := granted[p]; !is {
			e.t.Errorf("not granted, and yet it is used: %v", p)
		}
	}
}

// TestAttacherNeedsWhatItsManifestsGrant does the same for the attacher.
func TestAttacherNeedsWhatItsManifestsGrant(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{}, 1)
	granted := e.applyRBAC("attacher*")
	kubeconfig, used, refused := e.as("csi-attacher")
	if _, err := e.client.CoreV1().Secrets(e.ns).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	class := e.class(false, func(c *storagev1.StorageClass) {
		c.Parameters = map[string]string{"csi.storage.k8s.io/controller-publish-secret-name": "s",
			"csi.storage.k8s.io/controller-publish-secret-namespace": e.ns}
	})
	e.run("provision", quick...)
	e.inForce("csi-attacher", granted)
	e.run("attach", append(slices.Clone(quick), "--kubeconfig", kubeconfig, "--leader-election")...)
	e.claim("c", class)
	e.attach("a", e.bound("c"), e.nodes[0])
	e.attached(1)
	e.detach("a")
	e.attached(0)
	e.leftovers("c")
	e.usesAll(granted, used, refused, func(p permission) bool {
		// Of a server that cannot send it with the watch; of one who leads for the second time; after a conflict.
		return p.verb == "list" || p == permission{"patch", "", "events"} || p.verb == "get" &&
			(p.resource == "persistentvolumes" || p.resource == "volumeattachments")
	})
}
