package nodecontroller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/volumelock"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

const (
	protectionOfClaims = pvcProtection
	shortGrace         = 2 * time.Second
)

// fixture is a driver with a node that stays, the controller and the real API server.
// Names of cluster-wide objects carry that of the namespace, as does the driver, so that
// scenarios run side by side.
type fixture struct {
	*testing.T
	cp     *kubetest.ControlPlane
	client kubernetes.Interface
	ns     string
	driver string
	key    string
	ann    annotations
	cfg    Config
	user   *rest.Config // of the controller
	watch  *rest.Config // of its watches
	locks  volumelock.Locks
	requests
	reg  *prometheus.Registry // of the last start
	c    *Controller          // likewise
	stop func()               // ends the process as SIGTERM does
}

// scenario is a fixture whose controller is not started yet, in mode claims for all
// volumes, with a grace of seconds. Each scenario sets what differs.
func scenario(t *testing.T, change func(f *fixture)) *fixture {
	t.Helper()
	t.Parallel()
	f := newFixture(t)
	f.driver = f.ns + ".example.com"
	f.key, f.ann = "topology."+f.driver+"/node", annotationsOf(f.driver)
	f.cfg.NodeFinalizerMode, f.cfg.NodeCleanup, f.cfg.NodeCleanupScope = NodeFinalizerRemove, CleanupClaims, ScopeAll
	f.cfg.NodeDeleteGrace, f.cfg.NodeFinalizerWaitForOthers = 0, false
	f.cfg.MinMissingGrace, f.cfg.NodeMissingGrace, f.cfg.PVReleaseGrace = 0, shortGrace, shortGrace
	f.cfg.UnregisteredGrace = shortGrace
	if change != nil {
		change(f)
	}
	f.setUp()
	return f
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{T: t, cp: kubetest.Get(t)}
	f.client, f.ns, f.user, f.watch = f.cp.Client(), kubetest.Namespace(t, f.cp), f.cp.Config(), f.cp.Config()
	f.cfg = DefaultConfig()
	f.cfg.RetryIntervalStart, f.cfg.RetryIntervalMax = 100*time.Millisecond, time.Second
	return f
}

// setUp makes what every scenario has, once its driver and its settings are known.
func (f *fixture) setUp() {
	f.Helper()
	f.key, f.ann = "topology."+f.driver+"/node", annotationsOf(f.driver)
	cfg, _, err := f.cfg.Resolve(f.driver)
	f.must(err)
	f.cfg = cfg
	_, err = f.client.StorageV1().CSIDrivers().Create(f.Context(), &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: f.driver}}, metav1.CreateOptions{})
	f.must(err)
	f.class("c", nil)
	f.node("keep")
	f.Cleanup(f.removeEverything)
	f.Cleanup(f.checkWrites)
}

// removeEverything takes the cluster-wide objects away, whatever keeps them: other
// scenarios list them.
func (f *fixture) removeEverything() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	nodes, err := f.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return
	}
	bare := []byte(`{"metadata":{"finalizers":null}}`)
	for _, n := range nodes.Items {
		if strings.HasPrefix(n.Name, f.ns+"-") {
			_ = f.client.CoreV1().Nodes().Delete(ctx, n.Name, metav1.DeleteOptions{})
			_, _ = f.client.CoreV1().Nodes().Patch(ctx, n.Name, types.MergePatchType, bare, metav1.PatchOptions{})
			_ = f.client.StorageV1().CSINodes().Delete(ctx, n.Name, metav1.DeleteOptions{})
		}
	}
}

func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

func (f *fixture) name(s string) string { return f.ns + "-" + s }

// process is one running controller.
type process struct {
	reg  *prometheus.Registry
	c    *Controller
	stop func()
}

// start runs the controller as a process would.
func (f *fixture) start() {
	f.Helper()
	p := f.run(f.user)
	f.reg, f.c, f.stop = p.reg, p.c, p.stop
}

// run starts a controller for user, beside others that run already.
func (f *fixture) run(user *rest.Config) process {
	f.Helper()
	p := f.prepare(user)
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(f.Context()))
	done := make(chan error, 1)
	go func() { done <- p.c.Run(ctx) }()
	end := p.stop
	p.stop = sync.OnceFunc(func() {
		over := errors.New("the process is stopped")
		cancel(over)
		if err := <-done; !errors.Is(err, over) {
			f.Errorf("the controller returned %v", err)
		}
		end()
	})
	f.Cleanup(p.stop)
	return p
}

// prepare is a controller whose watches have begun, and that does not work yet.
func (f *fixture) prepare(user *rest.Config) process {
	f.Helper()
	reg := prometheus.NewRegistry()
	user = kubetest.Proxy(f.T, user, f.record)
	api, err := kubernetes.NewForConfig(user)
	f.must(err)
	custom, err := dynamic.NewForConfig(user)
	f.must(err)
	watches, err := kubernetes.NewForConfig(f.watch)
	f.must(err)
	meta, err := metadata.NewForConfig(f.watch)
	f.must(err)
	informers := kube.NewInformers(watches, meta, f.driver)
	informers.Retain(f.cfg.Details())
	broadcaster := record.NewBroadcaster()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: f.client.CoreV1().Events("")})
	c, err := New(f.cfg, Deps{
		Driver: f.driver, Client: api, Dynamic: custom, Informers: informers, Locks: &f.locks, Registry: reg, Queues: workloop.NewMetrics(reg),
		Events: broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: f.driver}),
	})
	f.must(err)
	watch, endWatch := context.WithCancel(context.WithoutCancel(f.Context()))
	informers.Start(watch)
	p := process{reg: reg, c: c, stop: sync.OnceFunc(func() {
		endWatch()
		informers.Shutdown()
		broadcaster.Shutdown()
	})}
	f.Cleanup(p.stop)
	return p
}

// proxied has what the controller asks for, apart from watches, go by hook.
func (f *fixture) proxied(hook func(w http.ResponseWriter, r *http.Request, pass http.Handler)) {
	f.Helper()
	f.user = kubetest.Proxy(f.T, f.user, hook)
}

// class makes a StorageClass of the driver.
func (f *fixture) class(name string, annotations map[string]string) {
	f.Helper()
	_, err := f.client.StorageV1().StorageClasses().Create(f.Context(), &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: f.name(name), Annotations: annotations}, Provisioner: f.driver,
	}, metav1.CreateOptions{})
	f.must(err)
}

// node makes a ready node with the driver on it.
func (f *fixture) node(name string, finalizers ...string) {
	f.Helper()
	f.must(kubetest.CreateNode(f.Context(), f.client, kubetest.NodeSpec{
		Name: f.name(name), Labels: map[string]string{f.key: f.name(name)}, Driver: f.driver, TopologyKeys: []string{f.key},
	}))
	if len(finalizers) > 0 {
		f.patchNode(name, fmt.Sprintf(`{"metadata":{"finalizers":["%s"]}}`, strings.Join(finalizers, `","`)))
	}
}

func (f *fixture) patchNode(name, patch string, subresources ...string) {
	f.Helper()
	_, err := f.client.CoreV1().Nodes().Patch(f.Context(), f.name(name), types.MergePatchType, []byte(patch), metav1.PatchOptions{}, subresources...)
	f.must(err)
}

// deleteNode deletes a Node, and its CSINode as the garbage collector would.
func (f *fixture) deleteNode(name string) {
	f.Helper()
	f.must(f.client.CoreV1().Nodes().Delete(f.Context(), f.name(name), metav1.DeleteOptions{}))
	f.must(f.client.StorageV1().CSINodes().Delete(f.Context(), f.name(name), metav1.DeleteOptions{}))
}

func (f *fixture) nodeGone(name string) {
	f.Helper()
	kubetest.Eventually(f.T, "node "+name+" is gone", func(ctx context.Context) error {
		node, err := f.client.CoreV1().Nodes().Get(ctx, f.name(name), metav1.GetOptions{})
		if kube.IsNotFound(err) {
			return nil
		}
		if err == nil {
			err = fmt.Errorf("it has finalizers %v", node.Finalizers)
		}
		return err
	})
}

// volume makes a volume that only the named nodes have, in phase Available.
func (f *fixture) volume(name string, nodes []string, change func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	f.Helper()
	values := make([]string, len(nodes))
	for i, n := range nodes {
		values[i] = f.name(n)
	}
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: f.name(name), Annotations: map[string]string{storagehelpers.AnnDynamicallyProvisioned: f.driver}},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete, StorageClassName: f.name("c"),
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: f.driver, VolumeHandle: f.name(name)}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: f.key, Operator: corev1.NodeSelectorOpIn, Values: values}},
			}}}},
		},
	}
	if change != nil {
		change(pv)
	}
	pv, err := f.client.CoreV1().PersistentVolumes().Create(f.Context(), pv, metav1.CreateOptions{})
	f.must(err)
	return pv
}

func (f *fixture) phase(pv *corev1.PersistentVolume, phase corev1.PersistentVolumePhase) *corev1.PersistentVolume {
	f.Helper()
	pv.Status.Phase = phase
	pv, err := f.client.CoreV1().PersistentVolumes().UpdateStatus(f.Context(), pv, metav1.UpdateOptions{})
	f.must(err)
	return pv
}

// claim makes a claim for a volume of the class of the driver.
func (f *fixture) claim(name string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	f.Helper()
	pvc := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{protectionOfClaims}},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: ptr.To(f.name("c")),
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}
	if change != nil {
		change(pvc)
	}
	pvc, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Create(f.Context(), pvc, metav1.CreateOptions{})
	f.must(err)
	return pvc
}

// bound makes the volume "pv-NAME" on a node and the claim NAME, bound to each other.
func (f *fixture) bound(name, node string) (*corev1.PersistentVolume, *corev1.PersistentVolumeClaim) {
	f.Helper()
	return f.boundTo(name, []string{node}, nil, nil)
}

func (f *fixture) boundTo(name string, nodes []string, changeVolume func(*corev1.PersistentVolume), changeClaim func(*corev1.PersistentVolumeClaim)) (*corev1.PersistentVolume, *corev1.PersistentVolumeClaim) {
	f.Helper()
	pvc := f.claim(name, func(pvc *corev1.PersistentVolumeClaim) {
		pvc.Spec.VolumeName = f.name("pv-" + name)
		pvc.Annotations = map[string]string{storagehelpers.AnnStorageProvisioner: f.driver}
		if changeClaim != nil {
			changeClaim(pvc)
		}
	})
	pvc.Status.Phase = corev1.ClaimBound
	pvc, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).UpdateStatus(f.Context(), pvc, metav1.UpdateOptions{})
	f.must(err)
	pv := f.volume("pv-"+name, nodes, func(pv *corev1.PersistentVolume) {
		pv.Spec.ClaimRef = &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: f.ns, Name: name, UID: pvc.UID}
		if changeVolume != nil {
			changeVolume(pv)
		}
	})
	return f.phase(pv, corev1.VolumeBound), pvc
}

// pod makes a pod that uses a claim; node is the whole name of its node, on which it runs.
func (f *fixture) pod(name, claim, node string) *corev1.Pod {
	f.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "i"}},
		Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}},
	}}
	pod, err := f.client.CoreV1().Pods(f.ns).Create(f.Context(), pod, metav1.CreateOptions{})
	f.must(err)
	if node != "" {
		pod, err = f.client.CoreV1().Pods(f.ns).Patch(f.Context(), name, types.MergePatchType, []byte(`{"status":{"phase":"Running"}}`), metav1.PatchOptions{}, "status")
		f.must(err)
	}
	return pod
}

func (f *fixture) getVolume(name string) *corev1.PersistentVolume {
	f.Helper()
	pv, err := f.client.CoreV1().PersistentVolumes().Get(f.Context(), f.name(name), metav1.GetOptions{})
	f.must(err)
	return pv
}

func (f *fixture) getClaim(name string) *corev1.PersistentVolumeClaim {
	f.Helper()
	pvc, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Get(f.Context(), name, metav1.GetOptions{})
	f.must(err)
	return pvc
}

// untilVolume waits until a volume, nil when it is gone, is as it should be.
func (f *fixture) untilVolume(name, what string, check func(pv *corev1.PersistentVolume) bool) (found *corev1.PersistentVolume) {
	f.Helper()
	kubetest.Eventually(f.T, name+" "+what, func(ctx context.Context) error {
		var err error
		found, err = f.client.CoreV1().PersistentVolumes().Get(ctx, f.name(name), metav1.GetOptions{})
		if kube.IsNotFound(err) {
			found = nil
		} else if err != nil {
			return err
		}
		if !check(found) {
			return fmt.Errorf("it is %+v", found)
		}
		return nil
	})
	return found
}

// claimDeleted waits until a claim is deleted or being deleted.
func (f *fixture) claimDeleted(name string) {
	f.Helper()
	kubetest.Eventually(f.T, "claim "+name+" is deleted", func(ctx context.Context) error {
		pvc, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Get(ctx, name, metav1.GetOptions{})
		if kube.IsNotFound(err) {
			return nil
		}
		if err == nil && pvc.DeletionTimestamp == nil {
			err = errors.New("it is there")
		}
		return err
	})
}

// release ends the life of a claim that is being deleted, and of its use of a volume, as
// the controllers of Kubernetes would.
func (f *fixture) release(name string) {
	f.Helper()
	_, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Patch(f.Context(), name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	f.must(err)
	f.phase(f.getVolume("pv-"+name), corev1.VolumeReleased)
}

// untouched checks that an object is still the one that it was, byte for byte.
func (f *fixture) untouched(objects ...metav1.Object) {
	f.Helper()
	for _, was := range objects {
		var is metav1.Object
		var err error
		switch was.(type) {
		case *corev1.PersistentVolume:
			is, err = f.client.CoreV1().PersistentVolumes().Get(f.Context(), was.GetName(), metav1.GetOptions{})
		case *corev1.PersistentVolumeClaim:
			is, err = f.client.CoreV1().PersistentVolumeClaims(was.GetNamespace()).Get(f.Context(), was.GetName(), metav1.GetOptions{})
		case *corev1.Pod:
			is, err = f.client.CoreV1().Pods(was.GetNamespace()).Get(f.Context(), was.GetName(), metav1.GetOptions{})
		case *corev1.Node:
			is, err = f.client.CoreV1().Nodes().Get(f.Context(), was.GetName(), metav1.GetOptions{})
		default:
			f.Fatalf("%T is not known here", was)
		}
		if err != nil {
			f.Errorf("%T %s: %v", was, was.GetName(), err)
		} else if is.GetUID() != was.GetUID() || is.GetResourceVersion() != was.GetResourceVersion() {
			f.Errorf("%T %s was changed: %+v", was, was.GetName(), is)
		}
	}
}

// event waits for an event about an object whose text has part, and returns its text.
func (f *fixture) event(kind, name, reason, part string) (message string) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("event %s with %q about %s %s", reason, part, kind, name), func(ctx context.Context) error {
		found := f.events(kind, name, reason)
		for _, m := range found {
			if strings.Contains(m, part) {
				message = m
				return nil
			}
		}
		return fmt.Errorf("there is only %q", found)
	})
	return message
}

// events is the texts of the events about an object with a reason.
func (f *fixture) events(kind, name, reason string) (messages []string) {
	f.Helper()
	list, err := f.client.CoreV1().Events("").List(f.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + name + ",reason=" + reason})
	f.must(err)
	for _, e := range list.Items {
		if e.InvolvedObject.Kind == kind && e.Source.Component == f.driver {
			messages = append(messages, e.Message)
		}
	}
	return messages
}

// told is how often an event about an object with a reason was sent: the same text sent
// again is one object that counts.
func (f *fixture) told(kind, name, reason string) (n int32) {
	f.Helper()
	list, err := f.client.CoreV1().Events("").List(f.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + name + ",reason=" + reason})
	f.must(err)
	for _, e := range list.Items {
		if e.InvolvedObject.Kind == kind && e.Source.Component == f.driver {
			n += max(e.Count, 1)
		}
	}
	return n
}

// gauge waits until a metric without labels has a value.
func (f *fixture) gauge(name string, want float64) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("%s is %v", name, want), func(context.Context) error {
		text := fmt.Sprintf("\n%s %v\n", name, want)
		families, err := f.reg.Gather()
		if err != nil {
			return err
		}
		for _, family := range families {
			if family.GetName() == name {
				if got := family.GetMetric()[0].GetGauge().GetValue(); got != want {
					return fmt.Errorf("it is %v, not%s", got, text)
				}
				return nil
			}
		}
		return errors.New("there is no such metric")
	})
}

// actions is how often something was done, whatever came of it.
func (f *fixture) actions(action string) float64 {
	n := 0.0
	for _, result := range []string{"ok", "gone", "conflict", "forbidden", "error"} {
		for _, mode := range []string{"claims", "volumes", "dry-run"} {
			n += testutil.ToFloat64(f.c.metrics.actions.WithLabelValues(action, mode, result))
		}
	}
	return n
}

// term is the running term, once it has begun.
func (f *fixture) term() (t *term) {
	f.Helper()
	kubetest.Eventually(f.T, "the controller works", func(context.Context) error {
		if t = f.c.current.Load(); t == nil {
			return errors.New("it does not")
		}
		return nil
	})
	return t
}

// seen waits until the caches of the controller say where a volume is.
func (f *fixture) seen(name string, want place) {
	f.Helper()
	t := f.term()
	kubetest.Eventually(f.T, fmt.Sprintf("%s is seen in place %d", name, want), func(context.Context) error {
		if got := t.look(f.name(name)).member.place; got != want {
			return fmt.Errorf("it is seen in %d", got)
		}
		return nil
	})
}

// passed waits until a time is over, for what must not happen within it.
func (f *fixture) passed(since time.Time, d time.Duration) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("%v are over", d), func(context.Context) error {
		if left := time.Until(since.Add(d)); left > 0 {
			return fmt.Errorf("%v are left", left)
		}
		return nil
	})
}

// looks has the controller look at a volume once more, here and now: what it does not do
// then, it does not do. Its place has to be seen before.
func (f *fixture) looks(name string) {
	f.Helper()
	_, err := f.term().syncVolume(f.Context(), f.name(name))
	f.must(err)
}

// staysFor checks that objects are not touched before d is over, nor by a look after it.
func (f *fixture) staysFor(d time.Duration, volume string, where place, objects ...metav1.Object) {
	f.Helper()
	f.seen(volume, where)
	f.passed(time.Now(), d)
	f.looks(volume)
	f.untouched(objects...)
}

// approve lets an administrator approve the clean-up of nodes.
func (f *fixture) approve(nodes, until string) {
	f.Helper()
	a := map[string]any{f.ann.approve: nodes}
	if until != "" {
		a[f.ann.until] = until
	}
	_, err := f.client.StorageV1().CSIDrivers().Patch(f.Context(), f.driver, types.MergePatchType, annotationsPatch(a), metav1.PatchOptions{})
	f.must(err)
}

func annotationsPatch(a map[string]any) []byte {
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": a}})
	if err != nil {
		panic(err)
	}
	return data
}

func (f *fixture) patchClass(name string, annotations map[string]any) {
	f.Helper()
	_, err := f.client.StorageV1().StorageClasses().Patch(f.Context(), f.name(name), types.MergePatchType, annotationsPatch(annotations), metav1.PatchOptions{})
	f.must(err)
}

// untilClaim waits until a claim, nil when it is gone, is as it should be.
func (f *fixture) untilClaim(name, what string, check func(pvc *corev1.PersistentVolumeClaim) bool) {
	f.Helper()
	kubetest.Eventually(f.T, name+" "+what, func(ctx context.Context) error {
		found, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Get(ctx, name, metav1.GetOptions{})
		if kube.IsNotFound(err) {
			found = nil
		} else if err != nil {
			return err
		}
		if !check(found) {
			return fmt.Errorf("it is %+v", found)
		}
		return nil
	})
}

// seenNode waits until the caches know a node, terminating or not.
func (f *fixture) seenNode(name string, terminating bool) {
	f.Helper()
	t := f.term()
	kubetest.Eventually(f.T, "node "+name+" is seen", func(context.Context) error {
		node, ok := t.nodes.Get(f.name(name))
		if !ok || (node.DeletionTimestamp != nil) != terminating {
			return fmt.Errorf("it is seen as %v", node)
		}
		return nil
	})
}

// finalizers waits until a node has just these.
func (f *fixture) finalizers(name string, want ...string) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("node %s has finalizers %v", name, want), func(ctx context.Context) error {
		node, err := f.client.CoreV1().Nodes().Get(ctx, f.name(name), metav1.GetOptions{})
		if err == nil && !slices.Equal(node.Finalizers, want) {
			err = fmt.Errorf("it has %v", node.Finalizers)
		}
		return err
	})
}
