// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/serving"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

// The names of TopoLVM, but for that of the driver, which is another one in
// each test so that the classes of one do not concern the next.
func testConfig(driver string) Config {
	return Config{
		Driver: driver, Address: "127.0.0.1:0",
		ClaimFinalizer: "topolvm.io/pvc", CapacityResource: "topolvm.io/capacity", CapacityAnnotationPrefix: "capacity.topolvm.io/",
		DeviceClassParameter: "topolvm.io/device-class", DefaultDeviceClass: "00default",
	}
}

const capacityResource = corev1.ResourceName("topolvm.io/capacity")

// fixture is a webhook server of its own and the real API server, which calls it for the
// objects of one namespace.
type fixture struct {
	testing.TB
	cp     *kubetest.ControlPlane
	client kubernetes.Interface // of the test
	ns     string
	cfg    Config
	ca     []byte       // signed the serving certificate
	certs  string       // the directory of the serving certificate
	api    *rest.Config // of the server; nil means that of the test
	watch  *rest.Config // of its informers, the same
	hook   func(*Server)
	reg    *prometheus.Registry
	s      *Server
	stop   func()
}

func setup(t testing.TB, change func(*fixture)) *fixture {
	t.Helper()
	f := &fixture{TB: t, cp: kubetest.Get(t, kubetest.Real())}
	f.client, f.ns = f.cp.Client(), kubetest.Namespace(t, f.cp)
	f.cfg = testConfig(f.ns + ".example.com")
	f.certificate()
	f.ca = servingPair().ca
	f.write(servingPair())
	if change != nil {
		change(f)
	}
	f.start()
	return f
}

// scenario is setup with a configuration by which the API server calls the server.
func scenario(t *testing.T, change func(*fixture)) *fixture {
	t.Helper()
	t.Parallel()
	f := setup(t, change)
	f.configure(nil)
	return f
}

func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// start runs a server until the test ends, or stop is called.
func (f *fixture) start() {
	f.Helper()
	api, watch := f.api, f.watch
	if api == nil {
		api = f.cp.Config()
	}
	if watch == nil {
		watch = f.cp.Config()
	}
	api = rest.CopyConfig(api) // and as the program sets it
	api.ContentType, api.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	client, err := kubernetes.NewForConfig(api)
	f.must(err)
	watcher, err := kubernetes.NewForConfig(watch)
	f.must(err)
	meta, err := metadata.NewForConfig(watch)
	f.must(err)
	informers := kube.NewInformers(watcher, meta, f.cfg.Driver)
	informers.Retain(kube.RetainedFields{Claims: true})
	f.reg = prometheus.NewRegistry()
	f.s, err = New(f.cfg, Deps{Client: client, Claims: informers.Claims(), Classes: informers.Classes(), Registry: f.reg})
	f.must(err)
	if f.hook != nil {
		f.hook(f.s)
	}
	watching, endWatch := context.WithCancel(context.WithoutCancel(f.Context()))
	informers.Start(watching)
	ctx, cancel := context.WithCancel(context.WithoutCancel(f.Context()))
	done := make(chan error, 1)
	s := f.s
	go func() { done <- s.Serve(ctx) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			f.Errorf("the server ended with %v", err)
		}
		endWatch()
		informers.Shutdown()
	})
	f.Cleanup(f.stop)
	f.eventually("the caches are filled", func(context.Context) error { return s.synced() })
}

// eventually waits for a state.
func (f *fixture) eventually(what string, check func(context.Context) error) {
	f.Helper()
	kubetest.Eventually(f, what, check)
}

// configure has the API server call the server, and waits until it does.
func (f *fixture) configure(change func(*admissionregistrationv1.MutatingWebhookConfiguration)) {
	f.Helper()
	hook := func(name, path, resource string) admissionregistrationv1.MutatingWebhook {
		return admissionregistrationv1.MutatingWebhook{
			Name:         name + "." + f.cfg.Driver,
			ClientConfig: admissionregistrationv1.WebhookClientConfig{URL: ptr.To("https://" + f.s.Address() + path), CABundle: f.ca},
			Rules: []admissionregistrationv1.RuleWithOperations{{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create},
				Rule: admissionregistrationv1.Rule{
					APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{resource},
				},
			}},
			FailurePolicy: ptr.To(admissionregistrationv1.Fail), SideEffects: ptr.To(admissionregistrationv1.SideEffectClassNone),
			TimeoutSeconds: ptr.To[int32](10), AdmissionReviewVersions: []string{"v1"},
			NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: f.ns}},
		}
	}
	config := &admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: f.ns},
		Webhooks: []admissionregistrationv1.MutatingWebhook{
			hook("pod-hook", "/pod/mutate", "pods"), hook("pvc-hook", "/pvc/mutate", "persistentvolumeclaims"),
		}}
	if change != nil {
		change(config)
	}
	f.configureAs(config)
}

// configureAs is configure with the whole configuration.
func (f *fixture) configureAs(config *admissionregistrationv1.MutatingWebhookConfiguration) {
	f.Helper()
	f.install(config)
	f.eventually("the API server calls the webhook", func(ctx context.Context) error {
		before := f.metric("storage_controller_webhook_requests_total", "path", "/pod/mutate")
		probe := podOf("probe-", emptyDir("v"), claimVolume("c", "none"))
		_, err := f.client.CoreV1().Pods(f.ns).Create(ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if f.metric("storage_controller_webhook_requests_total", "path", "/pod/mutate") == before {
			return fmt.Errorf("it was not asked (%v)", err)
		}
		return nil
	})
}

func (f *fixture) install(config *admissionregistrationv1.MutatingWebhookConfiguration) {
	f.Helper()
	configs := f.client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	_, err := configs.Create(f.Context(), config, metav1.CreateOptions{})
	f.must(err)
	f.Cleanup(func() {
		_ = configs.Delete(context.WithoutCancel(f.Context()), config.Name, metav1.DeleteOptions{}) // the control plane ends soon anyway
	})
}

// metric is the sum of the series of name that have the labels.
func (f *fixture) metric(name string, labels ...string) float64 {
	f.Helper()
	families, err := f.reg.Gather()
	f.must(err)
	total := 0.0
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.Metric {
			if hasLabels(m, labels) {
				total += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return total
}

func hasLabels(m *dto.Metric, labels []string) bool {
	for i := 0; i < len(labels); i += 2 {
		found := false
		for _, l := range m.Label {
			found = found || l.GetName() == labels[i] && l.GetValue() == labels[i+1]
		}
		if !found {
			return false
		}
	}
	return true
}

// class makes a class of the driver, or of provisioner, and waits until the server knows it.
func (f *fixture) class(name, device string, change ...func(*storagev1.StorageClass)) string {
	f.Helper()
	class := &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: f.ns + "-" + name}, Provisioner: f.cfg.Driver,
		Parameters:        map[string]string{f.cfg.DeviceClassParameter: device},
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
	}
	for _, c := range change {
		c(class)
	}
	_, err := f.client.StorageV1().StorageClasses().Create(f.Context(), class, metav1.CreateOptions{})
	f.must(err)
	f.Cleanup(func() {
		_ = f.client.StorageV1().StorageClasses().Delete(context.WithoutCancel(f.Context()), class.Name, metav1.DeleteOptions{})
	})
	f.eventually("the class is cached", func(context.Context) error {
		if _, ok := f.s.deps.Classes.Get(class.Name); !ok {
			return errors.New("it is not")
		}
		return nil
	})
	return class.Name
}

func foreign(class *storagev1.StorageClass) { class.Provisioner = "kubernetes.io/no-provisioner" }

// claim makes a claim that waits for a volume, and waits until the server knows it.
func (f *fixture) claim(name, class, size string, change ...func(*corev1.PersistentVolumeClaim)) string {
	f.Helper()
	pvc := f.newClaim(name, &class, size, change...)
	f.cached(pvc.Name, corev1.ClaimPending)
	return pvc.Name
}

func (f *fixture) newClaim(name string, class *string, size string,
	change ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	f.Helper()
	pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeClaimSpec{
		StorageClassName: class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}},
	}}
	for _, c := range change {
		c(pvc)
	}
	pvc, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Create(f.Context(), pvc, metav1.CreateOptions{})
	f.must(err)
	return pvc
}

// bind gives a claim the phase Bound, as the volume controller would.
func (f *fixture) bind(name string) {
	f.Helper()
	claims := f.client.CoreV1().PersistentVolumeClaims(f.ns)
	pvc, err := claims.Get(f.Context(), name, metav1.GetOptions{})
	f.must(err)
	pvc.Status.Phase = corev1.ClaimBound
	_, err = claims.UpdateStatus(f.Context(), pvc, metav1.UpdateOptions{})
	f.must(err)
}

// cached waits until the cache of the server has a claim in phase.
func (f *fixture) cached(name string, phase corev1.PersistentVolumeClaimPhase) {
	f.Helper()
	f.eventually("the claim is cached", func(context.Context) error {
		if pvc, ok := f.s.deps.Claims.Get(f.ns + "/" + name); !ok || pvc.Status.Phase != phase {
			return fmt.Errorf("it is %v", pvc)
		}
		return nil
	})
}

func emptyDir(name string) corev1.Volume {
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}
}

func claimVolume(name, claim string) corev1.Volume {
	return corev1.Volume{Name: name,
		VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}
}

func ephemeralVolume(name string, class *string, size string) corev1.Volume {
	template := &corev1.PersistentVolumeClaimTemplate{Spec: corev1.PersistentVolumeClaimSpec{
		StorageClassName: class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}},
	}}
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
		Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: template},
	}}
}

func podOf(name string, volumes ...corev1.Volume) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: name}, Spec: corev1.PodSpec{
		Volumes:    volumes,
		Containers: []corev1.Container{{Name: "a", Image: "a"}, {Name: "b", Image: "b"}},
	}}
}

// create makes a pod with volumes, one for each claim.
func (f *fixture) create(claims ...string) *corev1.Pod {
	f.Helper()
	var volumes []corev1.Volume
	for i, c := range claims {
		volumes = append(volumes, claimVolume(fmt.Sprint("v", i), c))
	}
	return f.createPod(podOf("pod-", volumes...))
}

func (f *fixture) createPod(pod *corev1.Pod) *corev1.Pod {
	f.Helper()
	created, err := f.client.CoreV1().Pods(f.ns).Create(f.Context(), pod, metav1.CreateOptions{})
	f.must(err)
	return created
}

// unpatched fails the test when pod has anything of the webhook.
func (f *fixture) unpatched(pod *corev1.Pod) {
	f.Helper()
	for _, c := range pod.Spec.Containers {
		if len(c.Resources.Limits)+len(c.Resources.Requests) > 0 {
			f.Errorf("container %s has resources %v", c.Name, c.Resources)
		}
	}
	if len(pod.Annotations) > 0 {
		f.Errorf("the pod has annotations %v", pod.Annotations)
	}
}

// patched fails the test unless pod is marked, with exactly these sums by device class.
func (f *fixture) patched(pod *corev1.Pod, sums map[string]string) {
	f.Helper()
	one := resource.MustParse("1")
	first := pod.Spec.Containers[0].Resources
	if !first.Requests[capacityResource].Equal(one) || !first.Limits[capacityResource].Equal(one) {
		f.Errorf("the first container has resources %v", first)
	}
	for _, c := range pod.Spec.Containers[1:] {
		if len(c.Resources.Limits)+len(c.Resources.Requests) > 0 {
			f.Errorf("container %s has resources %v", c.Name, c.Resources)
		}
	}
	want := map[string]string{}
	for device, bytes := range sums {
		want["capacity.topolvm.io/"+device] = bytes
	}
	if fmt.Sprint(pod.Annotations) != fmt.Sprint(want) {
		f.Errorf("the pod has annotations %v, want %v", pod.Annotations, want)
	}
}

// pair is a certificate for localhost with its key and its authority, in PEM.
type pair struct{ cert, key, ca []byte }

// newPair returns a pair that is valid for lifetime from an hour ago; 0 means a year.
func newPair(lifetime time.Duration) pair {
	chain, key, err := cert.GenerateSelfSignedCertKeyWithOptions(cert.SelfSignedCertKeyOptions{
		Host: "localhost", AlternateIPs: []net.IP{net.IPv4(127, 0, 0, 1)}, MaxAge: lifetime,
	})
	if err != nil {
		panic(err)
	}
	_, ca, _ := bytes.Cut(chain[1:], []byte("-----BEGIN"))
	return pair{chain, key, append([]byte("-----BEGIN"), ca...)}
}

// servingPair returns the pair of all tests that do not replace it.
var servingPair = sync.OnceValue(func() pair { return newPair(0) })

// certificate configures files in a new directory, without files.
func (f *fixture) certificate() {
	f.certs = f.TempDir()
	f.cfg.Certificate = &serving.Certificate{
		CertFile: filepath.Join(f.certs, corev1.TLSCertKey), KeyFile: filepath.Join(f.certs, corev1.TLSPrivateKeyKey), Flag: "--cert-dir",
	}
}

// write replaces the files as the kubelet does: a directory for each version, behind a link that is replaced.
func (f *fixture) write(p pair) {
	f.Helper()
	dir, err := os.MkdirTemp(f.certs, "..")
	f.must(err)
	for name, content := range map[string][]byte{corev1.TLSCertKey: p.cert, corev1.TLSPrivateKeyKey: p.key} {
		f.must(os.WriteFile(filepath.Join(dir, name), content, 0o600))
		_ = os.Symlink(filepath.Join("..data", name), filepath.Join(f.certs, name)) // fails if it is there
	}
	link := filepath.Join(f.certs, "..data")
	f.must(os.Symlink(filepath.Base(dir), link+"_new"))
	f.must(os.Rename(link+"_new", link))
}

// roots returns the pool with the authority of the test.
func (f *fixture) roots() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(f.ca)
	return pool
}

// dial connects to the server as the API server does.
func (f *fixture) dial() error {
	conn, err := tls.Dial("tcp", f.s.Address(), &tls.Config{RootCAs: f.roots(), ServerName: "localhost"})
	if err != nil {
		return err
	}
	return conn.Close()
}

// web is a client that trusts the authority of the test.
func (f *fixture) web() *http.Client {
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: f.roots()}, ForceAttemptHTTP2: true}
	f.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: time.Minute}
}

// post sends body, and is the status and the body of the answer.
func (f *fixture) post(path, media string, body []byte) (int, []byte) {
	f.Helper()
	response, err := f.web().Post("https://"+f.s.Address()+path, media, bytes.NewReader(body))
	f.must(err)
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	f.must(err)
	return response.StatusCode, data
}

// reviewOf is an AdmissionReview for a new object of resource in namespace.
func reviewOf(t testing.TB, namespace, resource string, object any) []byte {
	t.Helper()
	raw, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(map[string]any{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": map[string]any{
		"uid": "u1", "operation": "CREATE", "namespace": namespace,
		"resource": map[string]string{"group": "", "version": "v1", "resource": resource}, "object": json.RawMessage(raw),
	}})
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// ask posts a review and is the answer, which must not be an error.
func (f *fixture) ask(path, resource string, object any) *admissionv1.AdmissionResponse {
	f.Helper()
	code, body := f.post(path, "application/json", reviewOf(f, f.ns, resource, object))
	answer := admissionv1.AdmissionReview{}
	if err := json.Unmarshal(body, &answer); err != nil || code != 200 || answer.Response == nil || answer.Response.UID != "u1" ||
		!answer.Response.Allowed {
		f.Fatalf("%d %s", code, body)
	}
	return answer.Response
}
