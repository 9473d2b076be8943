package explain

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/provisioner"
)

// Clients are what is read with.
type Clients struct {
	Kubernetes kubernetes.Interface
	Dynamic    dynamic.Interface  // for snapshots and grants
	Metadata   metadata.Interface // for secrets
}

// The kinds that can be explained.
const (
	KindClaim      = "PersistentVolumeClaim"
	KindVolume     = "PersistentVolume"
	KindAttachment = "VolumeAttachment"
	KindNode       = "Node"
)

// Request names what to explain.
type Request struct {
	Kind      string // one of the constants
	Namespace string // of a claim
	Name      string
	StatusURL string // of a running process; "" for none
}

func (r Request) String() string {
	if r.Kind == KindClaim {
		return fmt.Sprintf("%s %s/%s", r.Kind, r.Namespace, r.Name)
	}
	return fmt.Sprintf("%s %q", r.Kind, r.Name)
}

// ErrNotFound is that there is no such object.
var ErrNotFound = errors.New("not found")

// Explain reads what there is and reports it. The error says why the object itself could
// not be read; whatever else cannot be read is said in the report.
func Explain(ctx context.Context, clients Clients, request Request) (Report, error) {
	g := &gatherer{Clients: clients, request: request, facts: &facts{now: time.Now()}}
	steps := map[string]struct {
		gather func(context.Context) error
		report func(*facts) Report
	}{
		KindClaim:      {g.ofClaim, reportClaim},
		KindVolume:     {g.ofVolume, reportVolume},
		KindAttachment: {g.ofAttachment, reportAttachment},
		KindNode:       {g.ofNode, func(f *facts) Report { return reportNode(f, request.Name) }},
	}
	step, ok := steps[request.Kind]
	if !ok {
		return Report{}, fmt.Errorf("kind %q cannot be explained", request.Kind)
	}
	if err := step.gather(ctx); err != nil {
		return Report{}, err
	}
	if request.StatusURL != "" {
		g.facts.process = readProcess(ctx, request.StatusURL)
	}
	return step.report(g.facts), nil
}

// gatherer reads what is needed for one object.
type gatherer struct {
	Clients
	request Request
	facts   *facts
}

// missing is the error of reading the object itself.
func (g *gatherer) missing(err error) error {
	switch {
	case noKind(err): // every API server has the kinds that can be explained
		return fmt.Errorf("%v: what answers is no API server of Kubernetes, or has it at another path; check --kubeconfig and --master: %w", g.request, err)
	case apierrors.IsNotFound(err) && g.request.Kind == KindClaim:
		return fmt.Errorf("%v: %w: check the name, and the namespace, which -n sets", g.request, ErrNotFound)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%v: %w: check the name", g.request, ErrNotFound)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%v: no permission to get it: ask the cluster administrator for that: %w", g.request, err)
	}
	return fmt.Errorf("%v: the API server gives no answer that can be used, check --kubeconfig and --master: %w", g.request, err)
}

func (g *gatherer) ofClaim(ctx context.Context) error {
	f := g.facts
	claim, err := g.Kubernetes.CoreV1().PersistentVolumeClaims(g.request.Namespace).Get(ctx, g.request.Name, metav1.GetOptions{})
	if err != nil {
		return g.missing(err)
	}
	f.claim = have(claim)
	f.class = g.class(ctx, storagehelpers.GetPersistentVolumeClaimClass(claim))
	if storagehelpers.GetPersistentVolumeClaimClass(claim) == "" && claim.Spec.StorageClassName == nil {
		f.classes = read(ctx, "list StorageClasses", func(ctx context.Context) ([]storagev1.StorageClass, error) {
			l, err := g.Kubernetes.StorageV1().StorageClasses().List(ctx, metav1.ListOptions{})
			return itemsOf(l, err, func(l *storagev1.StorageClassList) []storagev1.StorageClass { return l.Items })
		})
	}
	volume := claim.Spec.VolumeName
	if volume == "" {
		volume = provisioner.DefaultVolumeName(claim.UID)
	}
	f.volume = g.volume(ctx, volume)
	if f.driver = driverOfClaim(claim, f.class.value); f.driver == "" && f.volume.found {
		f.driver = migration.DriverOfVolume(f.volume.value)
	}
	g.ofDriver(ctx, f.driver)
	g.listNodes(ctx)
	if name := claim.Annotations[storagehelpers.AnnSelectedNode]; name != "" {
		g.oneNode(ctx, name)
	}
	f.pods = read(ctx, fmt.Sprintf("list pods in namespace %q", claim.Namespace), func(ctx context.Context) ([]corev1.Pod, error) {
		l, err := g.Kubernetes.CoreV1().Pods(claim.Namespace).List(ctx, metav1.ListOptions{})
		return itemsOf(l, err, func(l *corev1.PodList) []corev1.Pod { return l.Items })
	})
	if claim.Spec.VolumeName != "" {
		g.attachmentsOf(ctx, func(va storagev1.VolumeAttachment) bool { return volumeOf(&va) == claim.Spec.VolumeName })
	} else {
		g.ofRequest(ctx, claim, volume)
	}
	f.events = g.events(ctx, KindClaim, claim.Namespace, claim.Name, string(claim.UID))
	return nil
}

// ofRequest is what a claim without a volume needs.
func (g *gatherer) ofRequest(ctx context.Context, claim *corev1.PersistentVolumeClaim, volume string) {
	f := g.facts
	if f.class.found {
		var named []provisioner.NamedSecret
		named, f.secretsErr = provisioner.SecretsOf(f.class.value.Parameters, volume, claim)
		g.readSecrets(ctx, named)
		f.capacities = read(ctx, "list CSIStorageCapacities", func(ctx context.Context) ([]storagev1.CSIStorageCapacity, error) {
			l, err := g.Kubernetes.StorageV1().CSIStorageCapacities(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
			all, err := itemsOf(l, err, func(l *storagev1.CSIStorageCapacityList) []storagev1.CSIStorageCapacity { return l.Items })
			return slices.DeleteFunc(all, func(c storagev1.CSIStorageCapacity) bool { return c.StorageClassName != f.class.value.Name }), err
		})
	}
	source, err := provisioner.SourceOf(claim)
	if f.sourceErr = err; source != nil {
		g.source(ctx, claim, *source)
	}
}

func (g *gatherer) ofVolume(ctx context.Context) error {
	f := g.facts
	pv, err := g.Kubernetes.CoreV1().PersistentVolumes().Get(ctx, g.request.Name, metav1.GetOptions{})
	if err != nil {
		return g.missing(err)
	}
	f.volume = have(pv)
	f.driver = migration.DriverOfVolume(pv)
	f.class = g.class(ctx, classOfVolume(pv))
	if ref := pv.Spec.ClaimRef; ref != nil {
		f.claim = g.claim(ctx, ref.Namespace, ref.Name)
	}
	g.ofDriver(ctx, f.driver)
	g.listNodes(ctx)
	g.attachmentsOf(ctx, func(va storagev1.VolumeAttachment) bool { return volumeOf(&va) == pv.Name })
	g.readSecrets(ctx, secretsOfVolume(pv))
	f.events = g.events(ctx, KindVolume, metav1.NamespaceDefault, pv.Name, string(pv.UID))
	return nil
}

func (g *gatherer) ofAttachment(ctx context.Context) error {
	f := g.facts
	va, err := g.Kubernetes.StorageV1().VolumeAttachments().Get(ctx, g.request.Name, metav1.GetOptions{})
	if err != nil {
		return g.missing(err)
	}
	f.attachment = have(va)
	f.driver = va.Spec.Attacher
	g.oneNode(ctx, va.Spec.NodeName)
	if name := volumeOf(va); name != "" {
		f.volume = g.volume(ctx, name)
		g.attachmentsOf(ctx, func(other storagev1.VolumeAttachment) bool { return volumeOf(&other) == name && other.UID != va.UID })
		if f.volume.found {
			g.readSecrets(ctx, publishSecret(f.volume.value))
		}
	}
	g.ofDriver(ctx, f.driver)
	f.events = g.events(ctx, KindAttachment, metav1.NamespaceDefault, va.Name, string(va.UID))
	return nil
}

func (g *gatherer) ofNode(ctx context.Context) error {
	f := g.facts
	name := g.request.Name
	node, err := g.Kubernetes.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	switch {
	case err == nil:
		f.node = have(node)
	case apierrors.IsNotFound(err) && !noKind(err):
		f.node = known[*corev1.Node]{asked: true}
	default:
		return g.missing(err)
	}
	f.csiNode = g.csiNode(ctx, name)
	g.listNodes(ctx)
	f.volumes = read(ctx, "list PersistentVolumes", func(ctx context.Context) ([]corev1.PersistentVolume, error) {
		l, err := g.Kubernetes.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
		return itemsOf(l, err, func(l *corev1.PersistentVolumeList) []corev1.PersistentVolume { return l.Items })
	})
	g.attachmentsOf(ctx, func(va storagev1.VolumeAttachment) bool { return va.Spec.NodeName == name })
	// A node that is gone is told of while something still names it.
	if f.node.absent() && !f.csiNode.found && len(f.attachments.value) == 0 && len(f.volumesOfNode(name)) == 0 {
		return g.missing(err)
	}
	drivers := f.driversOfNode(name)
	if len(drivers) == 1 {
		f.driver = drivers[0]
		f.csiDriver = g.csiDriver(ctx, f.driver)
	}
	for _, d := range drivers {
		g.lease(ctx, roleNodecontroller, d)
	}
	uid := name
	if f.node.found {
		uid = string(node.UID)
	}
	f.events = g.events(ctx, KindNode, metav1.NamespaceDefault, name, uid)
	return nil
}
