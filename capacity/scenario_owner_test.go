// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// controlledBy makes o the controller of what gets the result. No kind is set in an object
// that the client returns.
func controlledBy(version, kind string, o metav1.Object) []metav1.OwnerReference {
	return []metav1.OwnerReference{{
		APIVersion: version, Kind: kind, Name: o.GetName(), UID: o.GetUID(), Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true),
	}}
}

func podTemplate() corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "driver"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "driver", Image: "none"}}},
	}
}

// pod makes the pod of the controller.
func (f *fixture) pod(name string, owners []metav1.OwnerReference) *corev1.Pod {
	f.Helper()
	pod, err := f.Client.CoreV1().Pods(f.Namespace).Create(f.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: owners}, Spec: podTemplate().Spec,
	}, metav1.CreateOptions{})
	f.Must(err)
	return pod
}

// statefulPod makes a StatefulSet with the pod "driver-0".
func (f *fixture) statefulPod() *appsv1.StatefulSet {
	f.Helper()
	kubetest.NeedReal(f)
	set, err := f.Client.AppsV1().StatefulSets(f.Namespace).Create(f.Context(), &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "driver"},
		Spec:       appsv1.StatefulSetSpec{Selector: &metav1.LabelSelector{MatchLabels: podTemplate().Labels}, Template: podTemplate()},
	}, metav1.CreateOptions{})
	f.Must(err)
	f.pod("driver-0", controlledBy("apps/v1", "StatefulSet", set))
	return set
}

// deployedPod makes a Deployment with a ReplicaSet and the pod "driver-x".
func (f *fixture) deployedPod() (*appsv1.Deployment, *appsv1.ReplicaSet, *corev1.Pod) {
	f.Helper()
	kubetest.NeedReal(f)
	selector := &metav1.LabelSelector{MatchLabels: podTemplate().Labels}
	deployment, err := f.Client.AppsV1().Deployments(f.Namespace).Create(f.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "driver"}, Spec: appsv1.DeploymentSpec{Selector: selector, Template: podTemplate()},
	}, metav1.CreateOptions{})
	f.Must(err)
	set, err := f.Client.AppsV1().ReplicaSets(f.Namespace).Create(f.Context(), &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: "driver-1", OwnerReferences: controlledBy("apps/v1", "Deployment", deployment)},
		Spec:       appsv1.ReplicaSetSpec{Selector: selector, Template: podTemplate()},
	}, metav1.CreateOptions{})
	f.Must(err)
	return deployment, set, f.pod("driver-x", controlledBy("apps/v1", "ReplicaSet", set))
}

// owner looks for the owner as a user who can get just resources, given as "group/name",
// and returns which objects were read.
func (f *fixture) owner(pod string, level int, resources ...string) (ref *metav1.OwnerReference, read []string, err error) {
	f.Helper()
	kubetest.NeedReal(f)
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{GenerateName: "owner-"}}
	for _, r := range resources {
		group, resource, _ := strings.Cut(r, "/")
		role.Rules = append(role.Rules, rbacv1.PolicyRule{Verbs: []string{"get"}, APIGroups: []string{group},
			Resources: []string{resource}})
	}
	role, err = f.Client.RbacV1().Roles(f.Namespace).Create(f.Context(), role, metav1.CreateOptions{})
	f.Must(err)
	user := f.Unique(role.Name)
	_, err = f.Client.RbacV1().RoleBindings(f.Namespace).Create(f.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
	}, metav1.CreateOptions{})
	f.Must(err)
	if len(resources) > 0 { // the authorizer sees new rules a moment later
		cfg := f.ControlPlane.UserConfig(f, user)
		meta, err := metadata.NewForConfig(cfg)
		f.Must(err)
		pods := meta.Resource(corev1.SchemeGroupVersion.WithResource("pods")).Namespace(f.Namespace)
		kubetest.Eventually(f, "the role is in force", func(ctx context.Context) error {
			_, err := pods.Get(ctx, pod, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}
			return err
		})
	}
	var mu sync.Mutex
	proxy := kubetest.Proxy(f, f.ControlPlane.UserConfig(f, user), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if _, path, in := strings.Cut(r.URL.Path, "/namespaces/"+f.Namespace+"/"); in {
			mu.Lock()
			read = append(read, r.Method+" "+path)
			mu.Unlock()
		}
		pass.ServeHTTP(w, r)
	})
	ref, err = f.ownerBy(proxy, pod, level)
	mu.Lock()
	defer mu.Unlock()
	return ref, slices.Clone(read), err
}

func (f *fixture) ownerBy(cfg *rest.Config, pod string, level int) (*metav1.OwnerReference, error) {
	f.Helper()
	meta, err := metadata.NewForConfig(cfg)
	f.Must(err)
	client, err := kubernetes.NewForConfig(cfg)
	f.Must(err)
	return FindOwner(f.Context(), meta, client.Discovery(), f.Namespace, pod, level)
}

// ownedBy has the controller give its objects the owner of a pod.
func (f *fixture) ownedBy(pod string, level int) {
	f.Helper()
	ref, err := f.ownerBy(f.ControlPlane.Config(), pod, level)
	f.Must(err)
	f.change = func(d *Deps) { d.Owner = ref }
}

// refers fails the test unless refs is a controlling reference to o, after others.
func (f *fixture) refers(refs []metav1.OwnerReference, kind string, o metav1.Object, others ...metav1.OwnerReference) {
	f.Helper()
	want := append(slices.Clone(others), metav1.OwnerReference{APIVersion: "apps/v1", Kind: kind, Name: o.GetName(), UID: o.GetUID(),
		Controller: ptr.To(true)})
	if kind == "Pod" {
		want[len(want)-1].APIVersion = "v1"
	}
	if !slices.EqualFunc(refs, want, func(a, b metav1.OwnerReference) bool { return a.String() == b.String() }) {
		f.Errorf("the owners are %v, want %v", refs, want)
	}
}

func TestCapacityScenarioOwner(t *testing.T) {
	t.Run("047_stateful_set", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, nil)
		set := f.statefulPod()
		ref, read, err := f.owner("driver-0", 1, "/pods")
		f.Must(err)
		if !slices.Equal(read, []string{"GET pods/driver-0"}) {
			t.Errorf("read %q", read)
		}
		f.change = func(d *Deps) { d.Owner = ref }
		f.makeFixture()
		f.start()
		for _, o := range f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi") {
			f.refers(o.OwnerReferences, "StatefulSet", set)
		}
	})
	t.Run("048_deployment_and_pod", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, nil)
		deployment, set, pod := f.deployedPod()
		ref, read, err := f.owner(pod.Name, 2, "/pods", "apps/replicasets")
		f.Must(err)
		if !slices.Equal(read, []string{"GET pods/driver-x", "GET replicasets/driver-1"}) {
			t.Errorf("read %q", read)
		}
		f.refers([]metav1.OwnerReference{*ref}, "Deployment", deployment)
		ref, _, err = f.owner(pod.Name, 1, "/pods")
		f.Must(err)
		f.refers([]metav1.OwnerReference{*ref}, "ReplicaSet", set)
		ref, read, err = f.owner(pod.Name, -3)
		if ref != nil || len(read) > 0 || err != nil {
			t.Errorf("level -3: %v, read %q, %v", ref, read, err)
		}
		ref, read, err = f.owner(pod.Name, 0, "/pods")
		f.Must(err)
		if !slices.Equal(read, []string{"GET pods/driver-x"}) {
			t.Errorf("level 0: read %q", read)
		}
		f.change = func(d *Deps) { d.Owner = ref }
		f.makeFixture()
		f.start()
		for _, o := range f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi") {
			f.refers(o.OwnerReferences, "Pod", pod)
		}
	})
	for name, tt := range map[string]struct {
		pod   string
		level int
		can   []string
		says  []string
	}{
		"049_no_controller": {"alone", 1, []string{"/pods"},
			[]string{`Pod "alone"`, "has no controlling owner reference", "--capacity-ownerref-level=1", "Set a lower level"}},
		"049_no_controller_of_the_replica_set": {"half", 2, []string{"/pods", "apps/replicasets"},
			[]string{`ReplicaSet "bare"`, "has no controlling owner reference"}},
		"049_no_pod": {"missing", 0, []string{"/pods"},
			[]string{`Pod "missing"`, "not found", "--capacity-ownerref-level=-1 for no owner"}},
		"049_no_replica_set":   {"orphan", 2, []string{"/pods", "apps/replicasets"}, []string{`ReplicaSet "gone"`, "not found"}},
		"049_pod_is_forbidden": {"driver-x", 1, nil, []string{`Pod "driver-x"`, "forbidden", "Grant get on it"}},
		"049_replica_set_is_forbidden": {"driver-x", 2, []string{"/pods"},
			[]string{`ReplicaSet "driver-1"`, "forbidden", "Grant get on it"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := prepare(t, csitest.Config{}, nil)
			f.deployedPod()
			f.pod("alone", nil)
			f.pod("orphan", []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "gone", UID: "1",
				Controller: ptr.To(true)}})
			set, err := f.Client.AppsV1().ReplicaSets(f.Namespace).Create(t.Context(), &appsv1.ReplicaSet{
				ObjectMeta: metav1.ObjectMeta{Name: "bare"},
				Spec: appsv1.ReplicaSetSpec{Selector: &metav1.LabelSelector{MatchLabels: podTemplate().Labels},
					Template: podTemplate()},
			}, metav1.CreateOptions{})
			f.Must(err)
			f.pod("half", controlledBy("apps/v1", "ReplicaSet", set))
			ref, _, err := f.owner(tt.pod, tt.level, tt.can...)
			if err == nil {
				t.Fatalf("the owner is %v", ref)
			}
			for _, text := range tt.says {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("the error is %q, which does not say %q", err, text)
				}
			}
		})
	}
	t.Run("049_api_server_away_for_a_moment", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, nil)
		set := f.statefulPod()
		var mu sync.Mutex
		failures := 2
		asked := 0
		proxy := kubetest.Proxy(f, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			mu.Lock()
			defer mu.Unlock()
			asked++
			if strings.HasSuffix(r.URL.Path, "/driver-0") && failures > 0 {
				failures--
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			pass.ServeHTTP(w, r)
		})
		ref, err := f.ownerBy(proxy, "driver-0", 1)
		f.Must(err)
		f.refers([]metav1.OwnerReference{*ref}, "StatefulSet", set)

		failures, asked = 100, 0
		if _, err := f.ownerBy(proxy, "driver-0", 1); err == nil || asked < answers {
			t.Errorf("of an API server that fails: %v after %d requests", err, asked)
		}
	})
	t.Run("050_owner_is_added", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, nil)
		set := f.statefulPod()
		f.ownedBy("driver-0", 1)
		before := f.existing("fast", "a", "1Gi", nil)
		f.makeFixture()
		f.start()
		f.eventuallyOwned(before, "StatefulSet", set)
	})
	t.Run("050_owner_is_added_again", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, func(c *Config) { c.PollInterval = 200 * time.Millisecond })
		set := f.statefulPod()
		f.ownedBy("driver-0", 1)
		f.makeFixture()
		f.start()
		o := f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi")[0]
		o.OwnerReferences = nil
		_, err := f.Client.StorageV1().CSIStorageCapacities(f.Namespace).Update(t.Context(), &o, metav1.UpdateOptions{})
		f.Must(err)
		f.eventuallyOwned(&o, "StatefulSet", set)
	})
	t.Run("051_owner_is_kept", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, func(c *Config) { c.OwnerRefLevel = -1 })
		deployment, _, _ := f.deployedPod()
		before := f.existing("fast", "a", "7Gi", func(o *storagev1.CSIStorageCapacity) {
			o.OwnerReferences = controlledBy("apps/v1", "Deployment", deployment)
		})
		f.makeFixture()
		f.start()
		for _, o := range f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi") {
			switch {
			case o.UID != before.UID && o.OwnerReferences != nil:
				t.Errorf("the owners of the new object are %v", o.OwnerReferences)
			case o.UID == before.UID && (len(o.OwnerReferences) != 1 ||
				o.OwnerReferences[0].String() != before.OwnerReferences[0].String()):
				t.Errorf("the owners are %v, were %v", o.OwnerReferences, before.OwnerReferences)
			}
		}
		f.still(before)
	})
	t.Run("052_another_owner", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, nil)
		deployment, set, pod := f.deployedPod()
		f.ownedBy(pod.Name, 2)
		other := metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}
		before := f.existing("fast", "a", "7Gi", func(o *storagev1.CSIStorageCapacity) {
			o.OwnerReferences = append(controlledBy("apps/v1", "ReplicaSet", set), other)
		})
		f.makeFixture()
		f.start()
		f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi")
		f.eventuallyOwned(before, "Deployment", deployment, other)
	})
}

// still is the object that before was, which the test fails without.
func (f *fixture) still(before *storagev1.CSIStorageCapacity) *storagev1.CSIStorageCapacity {
	f.Helper()
	o, err := f.Client.StorageV1().CSIStorageCapacities(f.Namespace).Get(f.Context(), before.Name, metav1.GetOptions{})
	f.Must(err)
	if o.UID != before.UID {
		f.Fatalf("%q is another object", o.Name)
	}
	return o
}

// eventuallyOwned waits until the object that before was has an owner of this kind.
func (f *fixture) eventuallyOwned(before *storagev1.CSIStorageCapacity, kind string, owner metav1.Object, others ...metav1.OwnerReference) {
	f.Helper()
	kubetest.Eventually(f, "the object has its owner", func(context.Context) error {
		if c := metav1.GetControllerOf(f.still(before)); c == nil || c.UID != owner.GetUID() {
			return errors.New("it has not")
		}
		return nil
	})
	f.refers(f.still(before).OwnerReferences, kind, owner, others...)
}
