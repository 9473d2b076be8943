package nodecontroller

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// profiled is a scenario with the settings of a profile and no others, but for where it listens and how long
// things take. It does not run beside others: the profile wants the one name of TopoLVM,
// and its objects are those of the whole cluster.
func profiled(t *testing.T, profile string) *fixture {
	t.Helper()
	f := newFixture(t)
	f.driver, f.cfg.Profile, f.cfg.WebhookAddr = "topolvm.io", profile, "127.0.0.1:0"
	f.cfg.MinMissingGrace, f.cfg.NodeMissingGrace = 0, shortGrace
	f.setUp()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		begin := time.Now()
		_ = f.client.StorageV1().CSIDrivers().Delete(ctx, f.driver, metav1.DeleteOptions{})
		_ = f.client.StorageV1().StorageClasses().Delete(ctx, f.name("c"), metav1.DeleteOptions{})
		bare := []byte(`{"metadata":{"finalizers":null}}`)
		for _, name := range []string{"lv", "other"} { // the kind goes when its objects are gone
			_ = f.client.Discovery().RESTClient().Patch(types.MergePatchType).AbsPath("/apis/topolvm.io/v1/logicalvolumes/" + name).Body(bare).Do(ctx)
		}
		_ = f.client.Discovery().RESTClient().Delete().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/logicalvolumes.topolvm.io").Do(ctx)
		err := kubetest.Await(ctx, func(ctx context.Context) error { // the next one installs it, or lacks it
			_, err := f.client.Discovery().RESTClient().Get().AbsPath("/apis/topolvm.io/v1/logicalvolumes").DoRaw(ctx)
			if apierrors.IsNotFound(err) {
				return nil
			}
			return errors.Join(err, errors.New("it is still served"))
		})
		if err != nil {
			t.Errorf("taking LogicalVolumes away for %v: %v", time.Since(begin), err)
		}
	})
	return f
}

// TestNodecontrollerScenarioProfile is the scenarios that are about TopoLVM, with its profile.
func TestNodecontrollerScenarioProfile(t *testing.T) {
	t.Parallel() // among themselves they are not
	for name, late := range map[string]bool{"007_topolvm": false, "018_topolvm_starts_later": true} {
		t.Run(name, func(t *testing.T) {
			f := profiled(t, ProfileTopoLVM)
			f.onlyWrites("DELETE persistentvolumeclaims/a", "PATCH logicalvolumes/lv", "DELETE logicalvolumes/lv", "PATCH nodes/n")
			records := f.installLogicalVolumes()
			f.node("n", "topolvm.io/node")
			f.selecting("a", "n")
			record, other := f.logicalVolume(records, "lv", "n"), f.logicalVolume(records, "other", "keep")
			var begin time.Time
			if late {
				f.deleteNode("n")
				begin = time.Now()
				f.start()
			} else {
				f.start()
				f.seenNode("n", false)
				begin = time.Now()
				f.deleteNode("n")
			}
			f.cleanedUp(records, record, other, begin)
		})
	}
	t.Run("020_topolvm_without_its_kind", func(t *testing.T) {
		f := profiled(t, ProfileTopoLVM)
		f.onlyWrites("DELETE persistentvolumeclaims/a", "PATCH nodes/n")
		f.node("n", "topolvm.io/node")
		f.selecting("a", "n")
		f.start()
		f.seenNode("n", false)
		begin := time.Now()
		f.deleteNode("n")
		f.nodeGone("n")
		f.claimDeleted("a")
		f.soon("all is gone", begin, 10*time.Second)
	})
	t.Run("086_topolvm_running_pod", func(t *testing.T) {
		f := profiled(t, ProfileTopoLVM)
		f.onlyWrites("PATCH persistentvolumes/pv-a", "DELETE persistentvolumeclaims/a", "PATCH nodes/n")
		f.node("n", "topolvm.io/node")
		f.bound("a", "n")
		pod := f.pod("p", "a", f.name("n"))
		f.start()
		f.deleteNode("n")
		f.nodeGone("n")
		f.claimDeleted("a")
		f.untouched(pod)
		if left := f.getClaim("a").Finalizers; len(left) != 1 || left[0] != pvcProtection {
			t.Errorf("the claim has finalizers %v", left)
		}
	})
	t.Run("058_topolvm_classic", func(t *testing.T) {
		f := profiled(t, ProfileTopoLVMClassic)
		f.onlyWrites("DELETE pods/a", "PATCH persistentvolumeclaims/c")
		guarded := func(pvc *corev1.PersistentVolumeClaim) { pvc.Finalizers = []string{"topolvm.io/pvc", pvcProtection} }
		f.claim("c", guarded)
		d := f.claim("d", guarded)
		f.pod("a", "c", f.name("keep"))
		b := f.pod("b", "d", f.name("keep"))
		f.start()
		f.must(f.client.CoreV1().PersistentVolumeClaims(f.ns).Delete(t.Context(), "c", metav1.DeleteOptions{}))
		kubetest.Eventually(t, "pod a is being deleted", func(ctx context.Context) error {
			a, err := f.client.CoreV1().Pods(f.ns).Get(ctx, "a", metav1.GetOptions{})
			if err == nil && (a.DeletionGracePeriodSeconds == nil || *a.DeletionGracePeriodSeconds != 1) {
				err = errors.New("it is not, or with another grace")
			}
			return err
		})
		f.untouched(b)
		if c := f.getClaim("c"); len(c.Finalizers) != 2 {
			t.Errorf("the claim has finalizers %v", c.Finalizers)
		}
		begin := time.Now()
		_, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Patch(t.Context(), "c", types.MergePatchType, []byte(`{"metadata":{"finalizers":["topolvm.io/pvc"]}}`), metav1.PatchOptions{})
		f.must(err)
		f.untilClaim("c", "is gone", func(pvc *corev1.PersistentVolumeClaim) bool { return pvc == nil })
		f.soon("the claim is gone", begin, 15*time.Second)
		f.untouched(b, d)
	})
}
