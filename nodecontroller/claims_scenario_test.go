package nodecontroller

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

const pvcProtection = "kubernetes.io/pvc-protection"

// claimsFixture is the claims loop and the real API server, with a proxy between that
// writes down what the loop asks for. All names carry that of the namespace, finalizers
// too: scenarios run side by side, and each loop works on the claims of the whole cluster.
type claimsFixture struct {
	*testing.T
	cp     *kubetest.ControlPlane
	client kubernetes.Interface
	ns     string
	driver string
	cfg    Config
	user   *rest.Config // of the loop
	watch  *rest.Config // of its watches
	c      *claims      // of the last start
	stop   func()       // ends the process
	lose   func()       // ends its term

	settled int

	mu sync.Mutex
	// hook may answer a request itself, or have something happen before it.
	hook     func(w http.ResponseWriter, r *http.Request) (answered bool)
	requests []request
}

// request is what the loop asked of the API server.
type request struct{ line, contentType, body string }

func newClaimsFixture(t *testing.T, change func(f *claimsFixture)) *claimsFixture {
	t.Helper()
	t.Parallel()
	f := &claimsFixture{T: t, cp: kubetest.Get(t)}
	f.client, f.ns, f.user = f.cp.Client(), kubetest.Namespace(t, f.cp), f.cp.Config()
	f.watch = f.cp.Config()
	f.driver = f.ns + ".example.com"
	f.cfg = Config{
		DriverName: f.driver, Workers: 2, Timeout: 15 * time.Second, RetryIntervalStart: 50 * time.Millisecond, RetryIntervalMax: time.Second,
		PVCFinalizer: f.driver + "/pvc", PVCFinalizerMode: ClaimOff, PVCPodDeletion: PodsOrphaned, PVCPodDeletionGrace: -1,
		ResizeAnnotation: f.driver + "/last-resizefs-requested-at",
	}
	if change != nil {
		change(f)
	}
	f.start()
	return f
}

// start runs the loop as a process would.
func (f *claimsFixture) start() {
	f.Helper()
	reg := prometheus.NewRegistry()
	api, err := kubernetes.NewForConfig(kubetest.Proxy(f.T, f.user, f.pass))
	f.must(err)
	watches, err := kubernetes.NewForConfig(f.watch)
	f.must(err)
	meta, err := metadata.NewForConfig(f.watch)
	f.must(err)
	informers := kube.NewInformers(watches, meta, f.driver)
	informers.Retain(f.cfg.Details())
	broadcaster := record.NewBroadcaster()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: f.client.CoreV1().Events("")})
	f.c = newClaims(f.cfg, Deps{
		Driver: f.driver, Client: api, Informers: informers, Registry: reg, Queues: workloop.NewMetrics(reg),
		Events: broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: f.driver}),
	})
	watch, endWatch := context.WithCancel(context.WithoutCancel(f.Context()))
	informers.Start(watch)
	f.lead()
	f.stop = sync.OnceFunc(func() {
		f.lose()
		endWatch()
		informers.Shutdown()
		broadcaster.Shutdown()
	})
	f.Cleanup(f.stop)
}

// lead begins a term.
func (f *claimsFixture) lead() {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(f.Context()))
	done := make(chan error, 1)
	go func() { done <- f.c.run(ctx) }()
	f.lose = sync.OnceFunc(func() {
		over := errors.New("the term is over")
		cancel(over)
		if err := <-done; !errors.Is(err, over) {
			f.Errorf("the loop returned %v", err)
		}
	})
}

func (f *claimsFixture) pass(w http.ResponseWriter, r *http.Request, pass http.Handler) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.Body = io.NopCloser(strings.NewReader(string(body)))
	line := r.Method + " " + strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/api/v1/"), "namespaces/"+f.ns+"/")
	f.mu.Lock()
	f.requests = append(f.requests, request{line, r.Header.Get("Content-Type"), string(body)})
	hook := f.hook
	f.mu.Unlock()
	if hook == nil || !hook(w, r) {
		pass.ServeHTTP(w, r)
	}
}

// on has hook asked before each request is passed on.
func (f *claimsFixture) on(hook func(w http.ResponseWriter, r *http.Request) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hook = hook
}

// asked is the requests of the loop so far, as METHOD path-in-the-namespace.
func (f *claimsFixture) asked() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var lines []string
	for _, r := range f.requests {
		if !strings.Contains(r.line, "/"+last) {
			lines = append(lines, r.line)
		}
	}
	return lines
}

// askedExactly checks the requests of the loop in the order of their text.
func (f *claimsFixture) askedExactly(want ...string) {
	f.Helper()
	got := f.asked()
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		f.Errorf("the loop asked for %q, want %q", got, want)
	}
}

func (f *claimsFixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

func (f *claimsFixture) claim(name string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	f.Helper()
	pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: f.claimSpec()}
	if change != nil {
		change(pvc)
	}
	pvc, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Create(f.Context(), pvc, metav1.CreateOptions{})
	f.must(err)
	return pvc
}

func (f *claimsFixture) claimSpec() corev1.PersistentVolumeClaimSpec {
	return corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: &f.ns,
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
	}
}

// withFinalizers gives a claim these finalizers.
func withFinalizers(names ...string) func(*corev1.PersistentVolumeClaim) {
	return func(pvc *corev1.PersistentVolumeClaim) { pvc.Finalizers = names }
}

func (f *claimsFixture) getClaim(name string) *corev1.PersistentVolumeClaim {
	f.Helper()
	pvc, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Get(f.Context(), name, metav1.GetOptions{})
	f.must(err)
	return pvc
}

func (f *claimsFixture) deleteClaim(name string) {
	f.Helper()
	f.must(f.client.CoreV1().PersistentVolumeClaims(f.ns).Delete(f.Context(), name, metav1.DeleteOptions{}))
}

// unprotect does what the controller of Kubernetes does for a claim that nobody uses.
func (f *claimsFixture) unprotect(name string) {
	f.Helper()
	_, err := kube.PatchMetadata(f.Context(), f.client.CoreV1().PersistentVolumeClaims(f.ns), f.getClaim(name), kube.MetadataPatch{RemoveFinalizers: []string{pvcProtection}})
	f.must(err)
}

func (f *claimsFixture) claimGone(name string) {
	f.Helper()
	kubetest.Eventually(f.T, "claim "+name+" is gone", func(ctx context.Context) error {
		pvc, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Get(ctx, name, metav1.GetOptions{})
		if kube.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is there: %v, %v", pvc.Finalizers, err)
	})
}

// pod makes a pod that uses claim, on node where that is not empty; on none it stays
// Pending, on a node it runs.
func (f *claimsFixture) pod(name, claim, node string, change func(*corev1.Pod)) *corev1.Pod {
	f.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kept": "label"}, Annotations: map[string]string{"kept": "annotation"}}, Spec: corev1.PodSpec{
		NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "example.com/i", Env: []corev1.EnvVar{{Name: "KEPT", Value: "env"}}}},
		Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}},
	}}
	phase := corev1.PodPending
	if node != "" {
		phase = corev1.PodRunning
	}
	pod.Status.Phase = phase
	if change != nil {
		change(pod)
		phase = pod.Status.Phase
	}
	pod, err := f.client.CoreV1().Pods(f.ns).Create(f.Context(), pod, metav1.CreateOptions{})
	f.must(err)
	if phase == corev1.PodPending {
		return pod
	}
	running, err := f.client.CoreV1().Pods(f.ns).Patch(f.Context(), name, types.MergePatchType, fmt.Appendf(nil, `{"status":{"phase":%q}}`, phase), metav1.PatchOptions{}, "status")
	if kube.IsNotFound(err) { // the loop was quicker
		return pod
	}
	f.must(err)
	return running
}

// podNow is a pod as it is; nil when it is gone.
func (f *claimsFixture) podNow(name string) *corev1.Pod {
	f.Helper()
	pod, err := f.client.CoreV1().Pods(f.ns).Get(f.Context(), name, metav1.GetOptions{})
	if kube.IsNotFound(err) {
		return nil
	}
	f.must(err)
	return pod
}

func (f *claimsFixture) podDeleted(name string) {
	f.Helper()
	kubetest.Eventually(f.T, "pod "+name+" is being deleted", func(context.Context) error {
		if pod := f.podNow(name); pod != nil && pod.DeletionTimestamp == nil {
			return errors.New("it is not")
		}
		return nil
	})
}

// unchanged checks that a pod is as it was.
func (f *claimsFixture) unchanged(pods ...*corev1.Pod) {
	f.Helper()
	for _, was := range pods {
		if now := f.podNow(was.Name); now == nil || now.ResourceVersion != was.ResourceVersion {
			f.Errorf("pod %s was touched: %+v", was.Name, now)
		}
	}
}

// node makes a node called like the namespace and name.
func (f *claimsFixture) node(name string) string {
	f.Helper()
	f.must(kubetest.CreateNode(f.Context(), f.client, kubetest.NodeSpec{Name: f.ns + "-" + name}))
	return f.ns + "-" + name
}

func (f *claimsFixture) class() {
	f.Helper()
	_, err := f.client.StorageV1().StorageClasses().Create(f.Context(), &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: f.ns}, Provisioner: f.driver}, metav1.CreateOptions{})
	f.must(err)
}

// volume makes the volume of a claim, of driver.
func (f *claimsFixture) volume(name, claim, driver string) {
	f.Helper()
	_, err := f.client.CoreV1().PersistentVolumes().Create(f.Context(), &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: f.ns + "-" + name}, Spec: corev1.PersistentVolumeSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain, ClaimRef: &corev1.ObjectReference{Namespace: f.ns, Name: claim},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: name}},
	}}, metav1.CreateOptions{})
	f.must(err)
}

// bound makes a claim and its volume, of driver.
func (f *claimsFixture) bound(name, driver string) {
	f.Helper()
	f.claim(name, func(pvc *corev1.PersistentVolumeClaim) { pvc.Spec.VolumeName = f.ns + "-" + name })
	f.volume(name, name, driver)
}

// grow says that the file system of a claim is to grow since at.
func (f *claimsFixture) grow(name string, at time.Time) {
	f.Helper()
	f.patchClaim(name, fmt.Sprintf(`{"status":{"conditions":[{"type":"FileSystemResizePending","status":"True","lastTransitionTime":%q}]}}`, at.UTC().Format(time.RFC3339)), "status")
}

func (f *claimsFixture) patchClaim(name, patch string, subresources ...string) {
	f.Helper()
	_, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Patch(f.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, subresources...)
	f.must(err)
}

// nudged waits until a pod has been told of something after since.
func (f *claimsFixture) nudged(name string, since time.Time) (pod *corev1.Pod) {
	f.Helper()
	kubetest.Eventually(f.T, "pod "+name+" is nudged", func(context.Context) error {
		if pod = f.podNow(name); pod == nil {
			return errors.New("it is gone")
		}
		value := pod.Annotations[f.cfg.ResizeAnnotation]
		if at, err := time.Parse(time.RFC3339Nano, value); err != nil || !at.After(since) || !strings.HasSuffix(value, "Z") {
			return fmt.Errorf("the annotation is %q, not after %v", value, since)
		}
		return nil
	})
	return pod
}

// last is how the names of what settles makes begin; requests for it do not count.
const last = "last-"

// settles waits until the loop has looked at everything that has happened so far: what
// comes after it, and has been dealt with. The loop must have one worker.
func (f *claimsFixture) settles() {
	f.Helper()
	f.settled++
	name := fmt.Sprint(last, f.settled)
	switch {
	case f.cfg.PVCFinalizerMode == ClaimEnforce:
		f.claim(name, withFinalizers(f.cfg.PVCFinalizer))
		f.deleteClaim(name)
		f.unprotect(name)
		f.claimGone(name)
	case f.cfg.PVCFinalizerMode == ClaimStrip:
		f.claim(name, withFinalizers(f.cfg.PVCObsoleteFinalizers...))
		f.stripped(name, pvcProtection)
	default:
		f.bound(name, f.driver)
		f.pod(name, name, "n", nil)
		f.grow(name, time.Now())
		f.nudged(name, time.Time{})
	}
}

// stripped waits until a claim has exactly these finalizers.
func (f *claimsFixture) stripped(name string, want ...string) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("claim %s has finalizers %v", name, want), func(context.Context) error {
		if got := f.getClaim(name).Finalizers; !slices.Equal(got, want) {
			return fmt.Errorf("it has %v", got)
		}
		return nil
	})
}

// event waits for an event with a reason about an object, and returns its text.
func (f *claimsFixture) event(kind, name, reason string) (message string) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("event %s about %s %s", reason, kind, name), func(ctx context.Context) error {
		list, err := f.client.CoreV1().Events(f.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.InvolvedObject.Kind == kind && e.InvolvedObject.Name == name && e.Reason == reason {
				message = e.Message
				return nil
			}
		}
		return fmt.Errorf("there are only %d others", len(list.Items))
	})
	return message
}

// counted waits until something was done for finalizers so often, with a result. It is
// counted after it has happened.
func (f *claimsFixture) counted(action, result string, want int) {
	f.Helper()
	f.counts(want, f.c.metrics.finalizers.WithLabelValues(action, result))
}

// nudgesCounted does the same for the pods that were told of a resize.
func (f *claimsFixture) nudgesCounted(result string, want int) {
	f.Helper()
	f.counts(want, f.c.metrics.nudges.WithLabelValues(result))
}

func (f *claimsFixture) counts(want int, counter prometheus.Counter) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("%v is %d", counter.Desc(), want), func(context.Context) error {
		if n := testutil.ToFloat64(counter); int(n) != want {
			return fmt.Errorf("it is %v", n)
		}
		return nil
	})
}

// some waits until a counter is not 0.
func (f *claimsFixture) some(counter prometheus.Counter) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("%v is not 0", counter.Desc()), func(context.Context) error {
		if testutil.ToFloat64(counter) == 0 {
			return errors.New("it is")
		}
		return nil
	})
}
