// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// quick makes retries quick enough for a test.
var quick = []string{"--retry-interval-start=100ms", "--retry-interval-max=500ms"}

// leftovers ends a test: everything is deleted, and nothing is left.
func (e *env) leftovers(claims ...string) {
	e.t.Helper()
	for _, c := range claims {
		e.deleteClaim(c)
	}
	e.agrees(0)
	e.eventually("no claim is left", func(ctx context.Context) error {
		list, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).List(ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("%d are, the first with finalizers %v", len(list.Items), list.Items[0].Finalizers)
		}
		return err
	})
}

func TestDriverAnswersWithErrorsFirst(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 1)
	class := e.class(false, nil)
	for _, method := range []string{"CreateVolume", "ControllerPublishVolume", "ControllerUnpublishVolume", "DeleteVolume"} {
		e.plugin.Next(method, csitest.Fail(codes.Internal, "broken"), csitest.Fail(codes.Unavailable, "away"),
			csitest.DoAndFail(codes.DeadlineExceeded, "slow"))
	}
	e.run("all", quick...)
	e.claim("c", class)
	e.attach("a", e.bound("c"), e.nodes[0])
	e.attached(1)
	e.agrees(1)
	e.detach("a")
	e.attached(0)
	e.leftovers("c")
	for _, method := range []string{"CreateVolume", "ControllerPublishVolume", "ControllerUnpublishVolume", "DeleteVolume"} {
		e.calls(method, 4)
	}
	// An indeterminate call is repeated with equal arguments.
	calls := e.plugin.Calls("CreateVolume")
	if a, b := fmt.Sprint(calls[1].Request), fmt.Sprint(calls[3].Request); a != b {
		t.Errorf("CreateVolume was repeated with other arguments:\n%s\n%s", a, b)
	}
}

func TestKilledWhileCreating(t *testing.T) {
	for name, step := range map[string]csitest.Step{"before the effect": csitest.Hang(), "after the effect": csitest.DoAndHang()} {
		for _, deleted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s deleted=%t", name, deleted), func(t *testing.T) {
				e := newEnv(t, csitest.Config{}, 0)
				class := e.class(false, nil)
				// A first indeterminate result protects the claim.
				e.plugin.Next("CreateVolume", csitest.Fail(codes.Aborted, "pending"), step)
				p := e.run("all", quick...)
				e.claim("c", class)
				e.wait("CreateVolume", 2)
				p.kill()
				if deleted {
					e.deleteClaim("c")
				}
				e.run("all", quick...)
				if deleted {
					e.leftovers()
					return
				}
				e.bound("c")
				e.agrees(1)
				e.leftovers("c")
			})
		}
	}
}

func TestKilledWhileAttaching(t *testing.T) {
	for name, step := range map[string]csitest.Step{"before the effect": csitest.Hang(), "after the effect": csitest.DoAndHang()} {
		for _, deleted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s deleted=%t", name, deleted), func(t *testing.T) {
				e := newEnv(t, csitest.Config{}, 1)
				class := e.class(false, nil)
				p := e.run("all", quick...)
				e.claim("c", class)
				volume := e.bound("c")
				e.plugin.Next("ControllerPublishVolume", step)
				e.attach("a", volume, e.nodes[0])
				e.wait("ControllerPublishVolume", 1)
				p.kill()
				if deleted {
					e.detach("a")
				}
				e.run("all", quick...)
				if deleted {
					e.attached(0)
				} else {
					e.attached(1)
					e.agrees(1)
					e.detach("a")
					e.attached(0)
				}
				e.leftovers("c")
			})
		}
	}
}

func TestDriverRestarts(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 1)
	class := e.class(false, nil)
	p := e.run("all", quick...)
	e.plugin.Next("CreateVolume", csitest.DoAndDrop()) // killed while it was making the volume
	e.claim("c1", class)
	e.bound("c1")
	e.plugin.Stop()
	e.claim("c2", class)
	e.eventually("the program has noticed", func(context.Context) error {
		if !strings.Contains(p.logged(), "Lost the connection") {
			return errors.New("it has not")
		}
		return nil
	})
	if err := e.plugin.Start(e.plugin.Address()); err != nil {
		t.Fatal(err)
	}
	e.bound("c2")
	e.agrees(2)
	e.calls("CreateVolume", 3) // none was spent on a driver that was away
	e.leftovers("c1", "c2")
}

func TestDriverComesBackAsAnother(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	p := e.run("all")
	e.eventually("the program is connected", func(context.Context) error {
		if !strings.Contains(p.logged(), "Connected to the driver") {
			return errors.New("it is not")
		}
		return nil
	})
	if err := e.plugin.Restart(func(c *csitest.Config) { c.Name = "other.example.com" }); err != nil {
		t.Fatal(err)
	}
	if code := p.code(); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	if got := p.logged(); !strings.Contains(got, "other.example.com") {
		t.Errorf("the log does not say why:\n%s", got)
	}
}

func TestAPIServerRestarts(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 1)
	e.restarted = true
	class := e.class(false, nil)
	e.run("all", quick...)
	e.claim("c1", class)
	volume := e.bound("c1")
	e.plugin.Next("CreateVolume", csitest.Delay(2*time.Second))
	e.plugin.Next("ControllerPublishVolume", csitest.Delay(2*time.Second))
	e.claim("c2", class)
	e.attach("a", volume, e.nodes[0])
	e.wait("CreateVolume", 2)
	e.wait("ControllerPublishVolume", 1)
	if err := e.cp.Halt(t.Context(), kubetest.APIServer); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := e.plugin.WaitIdle(ctx); err != nil { // the answers find no API server
		t.Fatal(err)
	}
	if err := e.cp.Resume(t.Context(), kubetest.APIServer); err != nil {
		t.Fatal(err)
	}
	e.bound("c2")
	e.attached(1)
	e.agrees(2)
	e.calls("CreateVolume", 2) // only saving the PersistentVolume was repeated
	e.detach("a")
	e.attached(0)
	e.leftovers("c1", "c2")
}

func TestLeaseIsTakenWhileCallsRun(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 1)
	class := e.class(false, nil)
	election := append([]string{"--leader-election", "--leader-election-lease-duration=3s", "--leader-election-renew-deadline=2s",
		"--leader-election-retry-period=500ms"}, quick...)
	first := e.run("all", election...)
	e.claim("c1", class)
	volume := e.bound("c1")
	e.plugin.Next("CreateVolume", csitest.DoAndHang())
	e.plugin.Next("ControllerPublishVolume", csitest.DoAndHang())
	e.claim("c2", class)
	e.attach("a", volume, e.nodes[0])
	e.wait("CreateVolume", 2)
	e.wait("ControllerPublishVolume", 1)
	first.signal(syscall.SIGSTOP) // it cannot renew
	second := e.run("all", election...)
	e.bound("c2")
	e.attached(1)
	first.signal(syscall.SIGCONT)
	e.eventually("the first has noticed", func(context.Context) error {
		if n := strings.Count(first.logged(), "Lost the Lease, now a standby"); n < 2 {
			return fmt.Errorf("it has, for %d of 2 Leases", n)
		}
		return nil
	})
	e.agrees(2)
	second.signal(syscall.SIGTERM)
	if code := second.code(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	e.detach("a") // the first works again
	e.attached(0)
	e.leftovers("c1", "c2")
}

func TestClaimDeletedWhileItsVolumeIsBeingCreated(t *testing.T) {
	t.Parallel()
	tests := map[string][]csitest.Step{
		"running call succeeds":                 {csitest.Hang()},
		"call times out, then succeeds":         {csitest.DoAndFail(codes.DeadlineExceeded, "slow")},
		"call times out, then fails":            {csitest.Fail(codes.DeadlineExceeded, "slow"), csitest.Fail(codes.Internal, "broken")},
		"indeterminate for long, then succeeds": {csitest.Fail(codes.Aborted, "x"), csitest.Fail(codes.Unavailable, "x"), csitest.Hang()},
	}
	for name, steps := range tests {
		for _, protection := range []string{"off", "on-retry", "always"} {
			t.Run(name+" "+protection, func(t *testing.T) {
				e := newEnv(t, csitest.Config{}, 0)
				class := e.class(false, nil)
				e.plugin.Next("CreateVolume", steps...)
				e.run("all", append([]string{"--provisioning-protection=" + protection}, quick...)...)
				e.claim("c", class)
				e.wait("CreateVolume", 1)
				e.deleteClaim("c")
				e.plugin.Release()
				e.wait("CreateVolume", len(steps))
				e.plugin.Release()
				e.leftovers()
			})
		}
	}
}

func TestSIGTERMLetsARunningCallFinish(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 1)
	class := e.class(false, nil)
	p := e.run("all", "--leader-election", "--http-endpoint=127.0.0.1:0")
	e.claim("c1", class)
	volume := e.bound("c1")
	e.plugin.Next("CreateVolume", csitest.Hang())
	e.plugin.Next("ControllerPublishVolume", csitest.Hang())
	claim := e.claim("c2", class)
	e.attach("a", volume, e.nodes[0])
	e.wait("CreateVolume", 2)
	e.wait("ControllerPublishVolume", 1)
	p.signal(syscall.SIGTERM)
	e.eventually("the program drains", func(context.Context) error {
		if !strings.Contains(p.logged(), "Shutting down") {
			return errors.New("it does not")
		}
		return nil
	})
	if status, body := p.get("/readyz"); status != http.StatusServiceUnavailable ||
		!strings.Contains(body, "the process is shutting down") {
		t.Errorf("while it drains it is ready: %d %s", status, body)
	}
	if status, _ := p.get("/readyz/driver"); status != http.StatusOK {
		t.Errorf("the check of the driver alone answers %d", status)
	}
	e.plugin.Release()
	if code := p.code(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if _, err := e.client.CoreV1().PersistentVolumes().Get(t.Context(), "pvc-"+string(claim.UID), metav1.GetOptions{}); err != nil {
		t.Errorf("the volume was not saved: %v", err)
	}
	e.attached(1)
	leases, err := e.client.CoordinationV1().Leases(e.ns).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range leases.Items {
		if l.Spec.HolderIdentity != nil && *l.Spec.HolderIdentity != "" {
			t.Errorf("Lease %s is held by %q", l.Name, *l.Spec.HolderIdentity)
		}
	}
	e.run("all", "--leader-election")
	e.detach("a")
	e.attached(0)
	e.leftovers("c1", "c2")
}

func TestSecondSignalEndsAtOnce(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	p := e.run("all")
	e.plugin.Next("CreateVolume", csitest.Hang())
	e.claim("c", e.class(false, nil))
	e.wait("CreateVolume", 1)
	p.signal(syscall.SIGTERM)
	e.eventually("the program drains", func(context.Context) error {
		if !strings.Contains(p.logged(), "Shutting down") {
			return errors.New("it does not")
		}
		return nil
	})
	p.signal(syscall.SIGTERM)
	if code := p.code(); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
}

// TestFullNodeIsLeft has four pods on a node whose segment has capacity for two volumes, and adds another node later.
func TestFullNodeIsLeft(t *testing.T) {
	e := newEnv(t, csitest.Config{Segments: []map[string]string{{}}, Capacity: 2 << 30}, 1)
	class := e.class(true, nil)
	e.run("all", append([]string{"--strict-topology"}, quick...)...)
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { kubetest.Kubelets{Client: e.client}.Run(ctx) })
	defer wg.Wait()
	defer stop()
	e.statefulSet("web", class, 4)
	e.running("web", 2)
	refused := func() map[string]bool {
		names := map[string]bool{}
		for _, c := range e.plugin.Calls("CreateVolume") {
			if status.Code(c.Err) == codes.ResourceExhausted {
				names[c.Request.(*csi.CreateVolumeRequest).Name] = true
			}
		}
		return names
	}
	e.eventually("the volumes of two more pods are refused", func(context.Context) error {
		if n := len(refused()); n != 2 {
			return fmt.Errorf("those of %d", n)
		}
		return nil
	})
	e.addNode()
	e.running("web", 4)
	e.agrees(4)
	used := map[string]int{}
	for _, v := range e.plugin.Volumes() {
		used[fmt.Sprint(v.Segment)]++
		if first := v.Segment[e.plugin.Name()+"/node"] == "a"; first == refused()[v.Name] {
			t.Errorf("volume %s is in %v, refused at first: %t", v.Name, v.Segment, !first)
		}
	}
	for segment, n := range used {
		if n != 2 {
			t.Errorf("%d volumes in %s", n, segment)
		}
	}
}

func TestEventsTellTheUser(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	class := e.class(false, nil)
	e.plugin.Next("CreateVolume", csitest.Fail(codes.ResourceExhausted, "no room for you"))
	e.run("all", quick...)
	claim := e.claim("c", class)
	e.bound("c")
	e.eventually("all events are there", func(ctx context.Context) error {
		events, err := e.client.CoreV1().Events(e.ns).List(ctx,
			metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(claim.UID)})
		if err != nil {
			return err
		}
		seen := map[string]string{}
		for _, ev := range events.Items {
			if strings.HasPrefix(ev.Source.Component, e.plugin.Name()) {
				seen[ev.Reason] = ev.Message
			}
		}
		if !strings.Contains(seen["ProvisioningFailed"], "rpc error: code = ResourceExhausted desc = no room for you") ||
			!strings.Contains(seen["ProvisioningFailed"], class) || seen["Provisioning"] == "" ||
			!strings.Contains(seen["ProvisioningSucceeded"], "pvc-"+string(claim.UID)) {
			return fmt.Errorf("there are %v", seen)
		}
		return nil
	})
	e.leftovers("c")
}

func TestVolumeThatIsTooSmallIsNotUsed(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	class := e.class(false, nil)
	e.plugin.Next("CreateVolume", csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.CapacityBytes = 1 }))
	e.run("all", quick...)
	e.claim("c", class)
	e.bound("c")
	e.agrees(1)
	e.calls("DeleteVolume", 1)
	e.leftovers("c")
}

func TestVolumeDeletedBeforeItsClaimIsReclaimed(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	e.run("all", quick...)
	e.claim("c", e.class(false, nil))
	volume := e.bound("c")
	if err := e.client.CoreV1().PersistentVolumes().Delete(t.Context(), volume, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	e.leftovers("c")
	e.calls("DeleteVolume", 1)
	if _, err := e.client.CoreV1().PersistentVolumes().Get(t.Context(), volume, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the volume is still there: %v", err)
	}
}

func TestForeignObjectsAreLeftAlone(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	e.run("all", quick...)
	mine := e.class(false, nil)
	pvc := newClaim("foreign", "other")
	pvc.Annotations = map[string]string{"volume.kubernetes.io/storage-provisioner": "other.example.com"}
	if _, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Create(t.Context(), pvc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	clone := newClaim("clone", mine)
	clone.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "foreign"}
	if _, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Create(t.Context(), clone, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	e.claim("own", mine)
	e.bound("own")
	e.calls("CreateVolume", 1) // never an empty volume for a clone
	e.agrees(1)
}
