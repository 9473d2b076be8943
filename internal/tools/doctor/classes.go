package doctor

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// checkClasses looks at the StorageClasses of the driver and the secrets that they name.
func (e *examination) checkClasses(ctx context.Context) {
	const name = "storageclasses"
	if e.driver.Name == "" {
		e.skip(name, "the name of the driver is not known")
		return
	}
	all, err := kube.ListAll[*storagev1.StorageClass](ctx, e.client.StorageV1().StorageClasses().List)
	if err != nil {
		e.skip(name, "not read (%s)", reason(err))
		return
	}
	var mine []*storagev1.StorageClass
	var found []string
	for _, c := range all {
		if c.Provisioner == e.driver.Name || c.Provisioner == migration.PluginOf(e.driver.Name) {
			mine = append(mine, c)
			found = append(found, c.Name)
		}
	}
	if mine == nil {
		e.add(name, Warning, "create one with provisioner: "+e.driver.Name, "none of the %d StorageClasses is for %s: there will be no claims for it", len(all), e.driver.Name)
		return
	}
	e.ok(name, "%s", names(found))
	reviewer, err := e.reviewer()
	if err != nil {
		e.skip("secrets", "making the client that asks for permissions: %v", err)
		return
	}
	seen := map[volumerules.Secret]bool{}
	for _, c := range mine {
		e.checkSecrets(ctx, reviewer, c, seen)
	}
}

func (e *examination) checkSecrets(ctx context.Context, reviewer kubernetes.Interface, class *storagev1.StorageClass, seen map[volumerules.Secret]bool) {
	secrets, err := volumerules.SecretTemplates(class.Parameters)
	if err != nil {
		e.add("storageclass "+class.Name, Failure, "correct the parameters; no volume of this class can be made", "%v", err)
		return
	}
	for _, s := range secrets {
		if seen[s] {
			continue
		}
		seen[s] = true
		if s.Purpose == volumerules.Provisioner && e.plan.runs("provisioner") || s.Purpose == volumerules.ControllerPublish && e.plan.runs("attacher") {
			e.mayRead(ctx, reviewer, s)
		}
		if !strings.Contains(s.Name+s.Namespace, "$") && !seen[volumerules.Secret{Namespace: s.Namespace, Name: s.Name}] {
			seen[volumerules.Secret{Namespace: s.Namespace, Name: s.Name}] = true
			e.secretExists(ctx, class.Name, s)
		}
	}
}

// mayRead asks for the permission on a secret, or on all where its place is a template.
func (e *examination) mayRead(ctx context.Context, client kubernetes.Interface, s volumerules.Secret) {
	role, file := "provisioner", "provisioner-secrets"
	if s.Purpose == volumerules.ControllerPublish {
		role, file = "attacher", "attacher-secrets"
	}
	a := access{verb: "get", resource: "secrets", namespace: s.Namespace, name: s.Name}
	if strings.Contains(s.Name, "$") {
		a.name = ""
	}
	if strings.Contains(s.Namespace, "$") {
		a.namespace = ""
	}
	name := fmt.Sprintf("rbac %s %s/%s", file, s.Namespace, s.Name)
	ok, err := allowed(ctx, client, a)
	switch {
	case err != nil:
		e.skip(name, "asking whether one may %s: %v", a, err)
	case ok:
		e.ok(name, "granted")
	case a.namespace == "":
		e.add(name, Warning, "apply deploy/rbac/"+file+"/rbac.yaml, or see that each such namespace has its Role", "not granted in all namespaces: the %s reads it where the parameters of the class lead", role)
	default:
		e.add(name, Failure, "apply deploy/rbac/"+file+"/rbac.yaml, or a Role in namespace "+s.Namespace, "not granted: %s; the %s needs it", a, role)
	}
}

// secretExists asks for the metadata only: what a secret holds stays at the API server.
func (e *examination) secretExists(ctx context.Context, class string, s volumerules.Secret) {
	name := fmt.Sprintf("secret %s/%s", s.Namespace, s.Name)
	_, err := e.meta.Resource(corev1.SchemeGroupVersion.WithResource("secrets")).Namespace(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		e.add(name, Warning, "create it, or correct the parameters of the class", "StorageClass %s names it for %s, and it does not exist", class, s.Purpose)
	case err != nil:
		e.skip(name, "StorageClass %s names it for %s; it was not looked at (%s)", class, s.Purpose, reason(err))
	default:
		e.ok(name, "there, for %s of StorageClass %s", s.Purpose, class)
	}
}
