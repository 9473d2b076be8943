package webhook

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// The leader gets by with the permissions that are shipped: it makes the Secret, follows
// it, publishes its authority and makes the Secret anew.
func TestUpkeepWithTheShippedPermissions(t *testing.T) {
	f := selfSigned(t, func(f *fixture) {
		f.api = f.cp.UserConfig("system:serviceaccount:" + f.ns + ":storage-controller-nodecontroller")
		f.grant("../../deploy/rbac/nodecontroller-webhook-certificates/rbac.yaml")
	})
	bundle := f.emptyConfig()
	stop := f.lead()
	published := func() {
		t.Helper()
		f.eventually("what is in the Secret is served and published", func(context.Context) error {
			if err := f.s.Ready(); err != nil {
				return err
			}
			secret, err := f.client.CoreV1().Secrets(f.ns).Get(t.Context(), "certs", metav1.GetOptions{})
			if err != nil {
				return err
			}
			leaf := parseCerts(secret.Data[certName])
			if len(leaf) == 0 || !f.s.keeper.current.Load().Leaf.Equal(leaf[0]) || !strings.HasPrefix(bundle(), string(secret.Data[caName])) {
				return errors.New("it is not")
			}
			return nil
		})
	}
	published()
	f.must(f.client.CoreV1().Secrets(f.ns).Delete(t.Context(), "certs", metav1.DeleteOptions{}))
	published()
	stop()
	if n := f.metric("storage_controller_webhook_cert_upkeep_total", "result", "error"); n != 0 {
		t.Errorf("%v errors", n)
	}
}

// grant creates what a file of permissions holds, for the names of the test.
func (f *fixture) grant(path string) {
	f.Helper()
	text, err := os.ReadFile(path)
	f.must(err)
	rbac := f.client.RbacV1()
	for _, doc := range strings.Split(string(text), "\n---\n") {
		for old, name := range map[string]string{
			`["storage-controller-webhook-certificates"]`: `["certs"]`, `["storage-controller-webhooks"]`: `["` + f.ns + `"]`,
			"namespace: default": "namespace: " + f.ns, "storage-controller:": f.ns + ":",
		} {
			doc = strings.ReplaceAll(doc, old, name)
		}
		var kind metav1.TypeMeta
		f.must(yaml.Unmarshal([]byte(doc), &kind))
		parse := func(obj any) { f.must(yaml.UnmarshalStrict([]byte(doc), obj)) }
		switch kind.Kind {
		case "Role":
			obj := &rbacv1.Role{}
			parse(obj)
			_, err = rbac.Roles(f.ns).Create(f.Context(), obj, metav1.CreateOptions{})
		case "RoleBinding":
			obj := &rbacv1.RoleBinding{}
			parse(obj)
			_, err = rbac.RoleBindings(f.ns).Create(f.Context(), obj, metav1.CreateOptions{})
		case "ClusterRole":
			obj := &rbacv1.ClusterRole{}
			parse(obj)
			_, err = rbac.ClusterRoles().Create(f.Context(), obj, metav1.CreateOptions{})
		case "ClusterRoleBinding":
			obj := &rbacv1.ClusterRoleBinding{}
			parse(obj)
			_, err = rbac.ClusterRoleBindings().Create(f.Context(), obj, metav1.CreateOptions{})
		default:
			f.Fatalf("%s holds a %q", path, kind.Kind)
		}
		f.must(err)
	}
}

// A claim that may not be read is an error of the server, and no answer.
func TestForbiddenReadIsAnError(t *testing.T) {
	t.Parallel()
	f := setup(t, func(f *fixture) { f.api = f.cp.UserConfig("nobody") })
	class := f.class("dc1", "dc1")
	f.claim("c", class, "1Gi")
	code, body := f.post("/pod/mutate", "application/json", reviewOf(t, f.ns, "pods", podOf("p", claimVolume("v", "c"))))
	if code != 500 || !strings.Contains(string(body), "forbidden") || !strings.Contains(string(body), f.ns+"/c") {
		t.Errorf("%d %s", code, body)
	}
	code, body = f.post("/pvc/mutate", "application/json", reviewOf(t, f.ns, "persistentvolumeclaims", &corev1.PersistentVolumeClaim{
		Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &f.ns}}))
	if code != 500 || !strings.Contains(string(body), "forbidden") || !strings.Contains(string(body), "StorageClass") {
		t.Errorf("%d %s", code, body)
	}
}
