package capacity

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/looptest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// story is a transcript of the StorageClass "fast" and the node "n1" in the zone a.
type story struct {
	*looptest.Fixture
	*looptest.Transcript
	cfg       Config
	c         *Controller  // of the last start
	available atomic.Int64 // in every segment
}

// newStory creates the node and starts the controller.
func newStory(t *testing.T, text string) *story {
	s := &story{cfg: DefaultConfig()}
	s.Fixture = looptest.New(t, csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_GET_CAPACITY,
	}})
	s.cfg.QPS, s.cfg.RemovalGrace, s.cfg.PollInterval = 0, 0, time.Hour
	s.Transcript = s.Record(text)
	s.available.Store(1 << 30)
	s.Plugin.Always(getCapacity, func(context.Context, *csitest.Plugin, any, func() (any, error)) (any, error) {
		return &csi.GetCapacityResponse{AvailableCapacity: s.available.Load()}, nil
	})
	s.node("n1", "a")
	s.start()
	return s
}

func (s *story) start() {
	s.Fixture.Helper()
	s.Start(func(p looptest.Process) (_ looptest.Loop, err error) {
		s.c, err = New(s.cfg, Deps{
			Driver: p.Driver, Client: p.Client, Informers: p.Informers, CSI: p.CSI.Controller(), Ready: p.CSI.WaitReady,
			Registry: p.Registry, Queues: p.Queues, Namespace: s.Namespace,
		})
		return s.c, err
	})
}

func (s *story) node(name, zone string) {
	s.Fixture.Helper()
	s.Must(kubetest.CreateNode(s.Fixture.Context(), s.Client, kubetest.NodeSpec{
		Name: s.Unique(name), Labels: map[string]string{"t/zone": zone}, Driver: s.Driver, TopologyKeys: []string{"t/zone"},
	}))
}

func (s *story) class() {
	s.Fixture.Helper()
	s.Step("StorageClass fast of the driver is created. Node n1 is in zone a.")
	_, err := s.Client.StorageV1().StorageClasses().Create(s.Fixture.Context(), &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: s.Unique("fast")}, Provisioner: s.Driver, Parameters: map[string]string{"pool": "ssd"},
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
	}, metav1.CreateOptions{})
	s.Must(err)
}

// published waits until the objects have these capacities, sorted.
func (s *story) published(want ...string) {
	s.Fixture.Helper()
	kubetest.Eventually(s.T, fmt.Sprintf("%q is published", want), func(ctx context.Context) error {
		list, err := s.Client.StorageV1().CSIStorageCapacities(s.Namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var got []string
		for _, o := range list.Items {
			got = append(got, o.Capacity.String())
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			return fmt.Errorf("%q is", got)
		}
		return nil
	})
}

// volume returns a PersistentVolume in zone a.
func (s *story) volume() *corev1.PersistentVolume {
	return &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{
		StorageClassName:       s.Unique("fast"),
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: s.Driver}},
		NodeAffinity: &corev1.VolumeNodeAffinity{
			Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{selects(in("t/zone", "a"))}},
		},
	}}
}

func TestTranscripts(t *testing.T) {
	t.Run("publish", func(t *testing.T) {
		s := newStory(
			t,
			"The capacity of each StorageClass in each segment is published, and updated after a volume\nwas provisioned there.",
		)
		s.class()
		s.published("1Gi")
		s.Step("The provisioner creates a volume in zone a.")
		s.available.Store(1 << 29)
		s.c.VolumeProvisioned(s.volume())
		s.published("512Mi")
		s.Golden("publish")
	})
	t.Run("node_joins_and_leaves", func(t *testing.T) {
		s := newStory(t, "The first node of a segment creates an object, and the last one deletes it, after\n--capacity-removal-grace.")
		s.class()
		s.published("1Gi")
		s.Step("Node n2 joins zone a, and then node n3 zone b.")
		s.node("n2", "a")
		s.node("n3", "b")
		s.published("1Gi", "1Gi")
		s.Step("Node n3 is deleted.")
		s.Must(s.Client.CoreV1().Nodes().Delete(t.Context(), s.Unique("n3"), metav1.DeleteOptions{}))
		s.published("1Gi")
		s.Golden("node_joins_and_leaves")
	})
	t.Run("class_deleted", func(t *testing.T) {
		s := newStory(t, "The objects of a deleted StorageClass are deleted.")
		s.class()
		s.published("1Gi")
		s.Step("The StorageClass is deleted.")
		s.Must(s.Client.StorageV1().StorageClasses().Delete(t.Context(), s.Unique("fast"), metav1.DeleteOptions{}))
		s.published()
		s.Golden("class_deleted")
	})
	t.Run("zero_capacity", func(t *testing.T) {
		s := newStory(
			t,
			"Without available capacity no object is created, because schedulers treat a missing object\nas zero capacity. An existing object is updated to 0.",
		)
		s.available.Store(0)
		s.class()
		s.Wait(getCapacity, 1)
		_ = s.Stop(workloop.ErrDrain)
		s.Step("Capacity becomes available. The process restarts.")
		s.available.Store(1 << 30)
		s.start()
		s.published("1Gi")
		_ = s.Stop(workloop.ErrDrain)
		s.Step("The capacity is used up. The process restarts and takes over the object.")
		s.available.Store(0)
		s.start()
		s.published("0")
		s.Golden("zero_capacity")
	})
}
