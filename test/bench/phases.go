// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

const (
	namespace = "bench"
	userAgent = "storage-bench"
	// annProvisioner is the annotation of PVCs that names the driver.
	annProvisioner = "volume.kubernetes.io/storage-provisioner"
	// parallel is how many requests the bench itself has under way.
	parallel = 50
	// settle is the time for what follows a phase and belongs to it: events, and requests that a watch caused. The phase ends
	// with the last of these requests.
	settle = time.Second
	// idle is the time without changes after which memory is measured.
	idle = 5 * time.Second
	// created and bound are the results of the phase provision: both begin with it, and end when all PersistentVolumes exist and
	// when all claims are bound.
	created, bound = "created", "bound"
)

type bench struct {
	o      options
	cp     *kubetest.ControlPlane
	client kubernetes.Interface
	plugin *csitest.Plugin // nil: a driver of the user
	driver string
	socket string
	dir    string // temporary
	host   string // name of the host that the sidecars see; empty means the real one

	profiled []string // addresses of the sidecars that serve profiles
	pids     []int
	logs     []string
	commands []string
}

func newClient(cp *kubetest.ControlPlane) (kubernetes.Interface, error) {
	cfg := cp.Config()
	cfg.UserAgent, cfg.ContentType = userAgent, "application/vnd.kubernetes.protobuf"
	return kubernetes.NewForConfig(cfg)
}

// each does something n times, many at the same time, until one fails.
func each(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan int)
	var wg sync.WaitGroup
	for range parallel {
		wg.Go(func() {
			for i := range next {
				if err := do(ctx, i); err != nil {
					cancel(err)
				}
			}
		})
	}
	for i := range n {
		select {
		case next <- i:
		case <-ctx.Done():
		}
	}
	close(next)
	wg.Wait()
	return context.Cause(ctx)
}

// prepare creates the objects that exist before the sidecars start.
func (b *bench) prepare(ctx context.Context) error {
	if _, err := b.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		metav1.CreateOptions{}); err != nil {
		return err
	}
	if _, err := b.client.StorageV1().StorageClasses().Create(ctx,
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "bench"}, Provisioner: b.driver, AllowVolumeExpansion: ptr.To(true)},
		metav1.CreateOptions{}); err != nil {
		return err
	}
	if err := b.prepareChanges(ctx); err != nil {
		return err
	}
	if err := each(ctx, b.o.nodes, func(ctx context.Context, i int) error {
		return kubetest.CreateNode(ctx, b.client, kubetest.NodeSpec{Name: node(i), Driver: b.driver})
	}); err != nil {
		return err
	}
	return each(ctx, b.o.foreign, b.foreign)
}

func node(i int) string { return fmt.Sprintf("node-%d", i) }

// foreign creates a volume of another driver.
func (b *bench) foreign(ctx context.Context, i int) error {
	return b.create(ctx, "foreign.example.com", fmt.Sprintf("foreign-%d", i), node(i%b.o.nodes))
}

// create creates a PVC, its PersistentVolume and its VolumeAttachment of a realistic size, as they are after
// the sidecars of a driver have provisioned and attached the volume.
func (b *bench) create(ctx context.Context, driver, name, node string) error {
	finalizer, err := b.createVolume(ctx, driver, name)
	if err != nil {
		return err
	}
	va, err := b.client.StorageV1().VolumeAttachments().Create(ctx, &storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{finalizer},
			Annotations: map[string]string{"csi.alpha.kubernetes.io/node-id": node}},
		Spec: storagev1.VolumeAttachmentSpec{Attacher: driver, NodeName: node,
			Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &name}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	va.Status.Attached = true
	_, err = b.client.StorageV1().VolumeAttachments().UpdateStatus(ctx, va, metav1.UpdateOptions{})
	return err
}

// createVolume creates a PVC and its PersistentVolume, as they are after a first attach. It returns the finalizer of the attacher.
func (b *bench) createVolume(ctx context.Context, driver, name string) (finalizer string, err error) {
	class := strings.TrimSuffix(driver, ".example.com")
	finalizer = "external-attacher/" + strings.ReplaceAll(driver, ".", "-")
	pvc := claim(name)
	pvc.Spec.StorageClassName, pvc.Spec.VolumeName = &class, name
	pvc.Annotations = map[string]string{annProvisioner: driver, "pv.kubernetes.io/bind-completed": "yes"}
	pvc.Labels = map[string]string{"app.kubernetes.io/name": "database", "app.kubernetes.io/instance": name}
	pvc, err = b.client.CoreV1().PersistentVolumeClaims(namespace).Create(ctx, pvc, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	// A patch, because the kube-controller-manager may write, too.
	status := []byte(`{"status":{"phase":"Bound","accessModes":["ReadWriteOnce"],"capacity":{"storage":"1Gi"}}}`)
	if _, err := b.client.CoreV1().PersistentVolumeClaims(namespace).Patch(ctx, name, types.MergePatchType, status,
		metav1.PatchOptions{}, "status"); err != nil {
		return "", err
	}
	pv := persistentVolume(driver, name, pvc, "external-provisioner.volume.kubernetes.io/finalizer", finalizer)
	_, err = b.client.CoreV1().PersistentVolumes().Create(ctx, pv, metav1.CreateOptions{})
	return finalizer, err
}

// attach creates the VolumeAttachment of a volume.
func (b *bench) attach(ctx context.Context, name, volume, node string) error {
	_, err := b.client.StorageV1().VolumeAttachments().Create(ctx, &storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: storagev1.VolumeAttachmentSpec{Attacher: b.driver, NodeName: node,
			Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &volume}},
	}, metav1.CreateOptions{})
	return err
}

// persistentVolume returns the PersistentVolume of a claim, as the sidecars of a driver create it.
func persistentVolume(driver, name string, pvc *corev1.PersistentVolumeClaim, finalizers ...string) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": driver},
			Finalizers: finalizers},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes: pvc.Spec.AccessModes, Capacity: pvc.Spec.Resources.Requests, StorageClassName: *pvc.Spec.StorageClassName,
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			ClaimRef: &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: namespace,
				Name: pvc.Name, UID: pvc.UID},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: driver, VolumeHandle: "vol-" + string(pvc.UID), FSType: "ext4",
				VolumeAttributes: map[string]string{"pool": "replicated", "cluster": "0123456789abcdef",
					"storage.kubernetes.io/csiProvisionerIdentity": "1700000000000-1234-" + driver},
			}},
		},
	}
}

func claim(name string) *corev1.PersistentVolumeClaim {
	class := "bench"
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}
}

// run runs the phases, one after the other.
func (b *bench) run(ctx context.Context) (*results, error) {
	r := &results{Commands: b.commands, Volumes: b.o.volumes, Nodes: b.o.nodes, Foreign: b.o.foreign, Latency: b.o.latency.String()}
	done := newTimes()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	b.watch(watching, done)
	b.watchSnapshots(watching, done)

	// One volume warms everything up, and shows that the sidecars work at all.
	say("waiting for the sidecars")
	begin := b.begin()
	if err := b.life(ctx, done, "warm-up", 0, 1, nil); err != nil {
		return nil, err
	}
	r.Start = b.end(begin, "start and first volume", 1, time.Since(begin.at), nil)
	say("idle for five seconds")
	begin = b.begin()
	if err := pause(ctx, idle); err != nil {
		return nil, err
	}
	r.Idle = b.end(begin, "idle", 0, idle, nil)
	err := b.life(ctx, done, "bench", 0, b.o.volumes, func(begin sample, of result) {
		p := b.between(begin, of.end, of.name, b.o.volumes, of.took, of.latencies)
		p.extend(begin.at, b.o.volumes)
		r.Phases = append(r.Phases, p)
		say("%-15s %5.1f s", p.Name, p.Seconds)
	})
	return r, err
}

// action is what the bench does to each volume in a phase.
type action struct {
	name string
	do   func(ctx context.Context, i int) error
}

// phases returns the actions of the phases that were asked for.
func (b *bench) phases(done *times, name func(int) string) []action {
	claims := b.client.CoreV1().PersistentVolumeClaims(namespace)
	attachments := b.client.StorageV1().VolumeAttachments()
	all := append([]action{
		{"provision", func(ctx context.Context, i int) error {
			pvc := claim(name(i))
			// The kube-controller-manager has one worker, which annotates PVCs more slowly than they are provisioned, and
			// binds the first ones before it has annotated the last ones. So the bench annotates them.
			pvc.Annotations = map[string]string{annProvisioner: b.driver}
			_, err := claims.Create(ctx, pvc, metav1.CreateOptions{})
			return err
		}},
		{"attach", func(ctx context.Context, i int) error {
			return b.attach(ctx, name(i), done.volume(name(i)), node(i%b.o.nodes))
		}},
		{"detach", func(ctx context.Context, i int) error {
			return attachments.Delete(ctx, name(i), metav1.DeleteOptions{})
		}},
		{"delete", func(ctx context.Context, i int) error { return claims.Delete(ctx, name(i), metav1.DeleteOptions{}) }},
	}, b.changes(done, name)...)
	var chosen []action
	for _, phase := range b.o.phases {
		for _, a := range all {
			if a.name == phase {
				chosen = append(chosen, a)
			}
		}
	}
	return chosen
}

// result is what a phase measures, or a part of it.
type result struct {
	name      string
	end       sample
	took      time.Duration // until the last volume
	latencies []time.Duration
}

// life runs the phases of the volumes, and reports their results to tell unless that is nil.
func (b *bench) life(ctx context.Context, done *times, prefix string, first, n int, tell func(begin sample, of result)) error {
	name := func(i int) string { return fmt.Sprintf("%s-%d", prefix, first+i) }
	for _, p := range b.phases(done, name) {
		stop := func() {}
		if tell != nil {
			stop = b.profileCPU(ctx, p.name)
		}
		begin := b.begin()
		began := make([]time.Time, n)
		if err := each(ctx, n, func(ctx context.Context, i int) error {
			began[i] = time.Now()
			return p.do(ctx, i)
		}); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		parts := []string{p.name}
		if p.name == "provision" {
			parts = []string{created, bound}
		}
		var results []result
		for _, part := range parts {
			r := result{name: part}
			for i := range n {
				at, err := done.wait(ctx, part+" "+name(i))
				if err != nil {
					return fmt.Errorf("%s: waiting for %s: %w%s", part, name(i), err, b.tails())
				}
				r.latencies = append(r.latencies, at.Sub(began[i]))
			}
			r.end = b.begin()
			r.took = r.end.at.Sub(begin.at)
			results = append(results, r)
		}
		if tell == nil {
			continue
		}
		if err := pause(ctx, settle); err != nil {
			return err
		}
		results[len(results)-1].end = b.begin()
		for _, r := range results {
			tell(begin, r)
		}
		stop()
		b.profileMemory(ctx, p.name)
	}
	return nil
}

// watch notes when things are done, "PHASE NAME", until ctx ends. It returns after the first lists.
func (b *bench) watch(ctx context.Context, done *times) {
	factory := informers.NewSharedInformerFactory(b.client, 0)
	add := func(i cache.SharedIndexInformer, seen func(any), gone func(any)) {
		_, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: seen, UpdateFunc: func(_, obj any) { seen(obj) }, DeleteFunc: func(obj any) {
				if missed, ok := obj.(cache.DeletedFinalStateUnknown); ok {
					obj = missed.Obj
				}
				gone(obj)
			},
		})
		if err != nil {
			panic(err) // a new informer cannot refuse
		}
	}
	add(factory.Core().V1().PersistentVolumes().Informer(), func(obj any) {
		if pv := obj.(*corev1.PersistentVolume); pv.Spec.ClaimRef != nil {
			done.made(pv.Spec.ClaimRef.Name, pv.Name)
			done.note(created + " " + pv.Spec.ClaimRef.Name)
		}
	}, func(obj any) { done.note("delete " + obj.(*corev1.PersistentVolume).Spec.ClaimRef.Name) })
	add(factory.Core().V1().PersistentVolumeClaims().Informer(), func(obj any) {
		if pvc := obj.(*corev1.PersistentVolumeClaim); pvc.Status.Phase == corev1.ClaimBound {
			done.note(bound + " " + pvc.Name)
		}
		noteChanges(done, obj.(*corev1.PersistentVolumeClaim))
	}, func(any) {})
	add(factory.Storage().V1().VolumeAttachments().Informer(), func(obj any) {
		if va := obj.(*storagev1.VolumeAttachment); va.Status.Attached {
			done.note("attach " + va.Name)
		}
	}, func(obj any) { done.note("detach " + obj.(*storagev1.VolumeAttachment).Name) })
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
}

// tails is the end of the logs of the sidecars, for an error.
func (b *bench) tails() string {
	var out strings.Builder
	for i, name := range b.logs {
		data, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		lines := strings.Split(strings.TrimSpace(string(data)), "\n")
		fmt.Fprintf(&out, "\nthe end of the log of %q:\n%s", b.commands[i], strings.Join(lines[max(0, len(lines)-15):], "\n"))
	}
	return out.String()
}

// times is when things were done.
type times struct {
	mu      sync.Mutex
	at      map[string]time.Time
	volumes map[string]string
	changed chan struct{}
}

func newTimes() *times {
	return &times{at: map[string]time.Time{}, volumes: map[string]string{}, changed: make(chan struct{})}
}

func (t *times) note(what string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, known := t.at[what]; !known {
		t.at[what] = time.Now()
		close(t.changed)
		t.changed = make(chan struct{})
	}
}

func (t *times) made(claim, volume string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.volumes[claim] = volume
}

func (t *times) volume(claim string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.volumes[claim]
}

func (t *times) wait(ctx context.Context, what string) (time.Time, error) {
	for {
		t.mu.Lock()
		at, ok := t.at[what]
		changed := t.changed
		t.mu.Unlock()
		if ok {
			return at, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return time.Time{}, context.Cause(ctx)
		}
	}
}
