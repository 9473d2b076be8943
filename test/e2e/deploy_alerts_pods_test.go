// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// TestAlertsAboutVolumesAndPods is of one process, to which several things happen.
func TestAlertsAboutVolumesAndPods(t *testing.T) {
	t.Parallel()
	e, p, h := watched(t)
	class := e.class(false, nil)
	e.claim("c", class)
	volume := e.bound("c")
	e.attach("a", volume, e.nodes[0])
	e.attached(1)
	h.minute(p, "a")
	h.pods(p)
	h.minute(p, "a")
	h.pods(p)
	h.fires(t)

	// No object makes the program panic or violate an invariant, as far as is known. So that it has done so is told by
	// its counters alone; tests of the loop have real ones.
	for alert, name := range map[string]string{
		"WorkerPanic": "storage_controller_worker_panics_total", "InvariantViolated": "storage_controller_invariant_violations_total",
	} {
		t.Run(alert+"_with_its_counter_raised_by_hand", func(t *testing.T) {
			counter := name + `{name="claims"} `
			counted := history{Scrapes: slices.Clone(h.Scrapes), now: h.now}
			counted.minute(p, "a")
			last := &counted.Scrapes[len(counted.Scrapes)-1]
			raised := strings.Replace(last.Text, counter+"0\n", counter+"1\n", 1)
			if raised == last.Text {
				t.Fatal("the process does not show that there was none")
			}
			last.Text = raised
			counted.fires(t, alert)
		})
	}

	e.unpublish(volume, "id-0")
	e.eventually("a comparison has found it", func(context.Context) error {
		if p.value("storage_controller_attach_mismatches_total", "reported=unpublished") == 0 {
			return errors.New("none has")
		}
		return nil
	})
	allow := e.forbids(admissionv1.Create, "", "persistentvolumes",
		fmt.Sprintf("has(object.spec.csi) && object.spec.csi.driver == %q", e.plugin.Name()))
	e.eventually("volumes are refused", func(ctx context.Context) error {
		_, err := e.client.CoreV1().PersistentVolumes().Create(ctx,
			&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: e.ns + "-refused"}, Spec: corev1.PersistentVolumeSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Capacity: newClaim("", "").Spec.Resources.Requests,
				PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: e.plugin.Name(),
					VolumeHandle: "none"}},
			}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return refused(err)
	})
	e.claim("refused", class)
	unsaved := func(want float64) {
		e.eventually(fmt.Sprintf("%v volumes are not saved", want), func(context.Context) error {
			if n := p.value("storage_controller_provisioner_volumes_unsaved", ""); n != want {
				return fmt.Errorf("%v are", n)
			}
			return nil
		})
	}
	unsaved(1)
	e.attached(1)
	for range 2 { // and the volume is detached only once
		h.minute(p, "a")
		h.pods(p)
	}
	h.fires(t, "AttachMismatch", "VolumesUnsaved")
	allow()
	unsaved(0) // as the runbook says
	e.bound("refused")

	e.plugin.Stop()
	e.eventually("it is not ready", func(context.Context) error {
		if status, _ := p.get("/readyz"); status == http.StatusOK {
			return errors.New("it is")
		}
		return nil
	})
	pods := newHistory()
	pods.now += 60
	pods.pods(p)
	pods.fires(t, "NotReady", "Unavailable")
	const failed = `kube_pod_status_phase{namespace=%q,pod="csi-controller-5d8c-x2z",uid="u",phase="Failed"} 1` + "\n"
	text := fmt.Sprintf(failed, "n") + fmt.Sprintf(failed, "m") // pods that a shutdown of their node has ended
	pods.Scrapes = append(pods.Scrapes, scraped{pods.now, ofKubeStateMetrics, text, 0})
	pods.fires(t, "Unavailable")
}

// pods adds what kube-state-metrics would show of the Deployments of the overlays if their
// containers were p, which is asked whether it is ready as the kubelet asks it.
func (h *history) pods(p *process) {
	p.t.Helper()
	var b strings.Builder
	for overlay, namespace := range map[string]string{"all-in-one": "n", "per-role": "m"} {
		for _, o := range kustomized(p.t, overlays+overlay) {
			if o.GetKind() != "Deployment" {
				continue
			}
			available, probes := 1, 0
			for _, c := range converted[appsv1.Deployment](p.t, o).Spec.Template.Spec.Containers {
				if c.ReadinessProbe == nil {
					continue
				}
				probes++
				ready := 0
				if status, _ := p.get(c.ReadinessProbe.HTTPGet.Path); status == http.StatusOK {
					ready = 1
				}
				available = min(available, ready)
				fmt.Fprintf(&b, "kube_pod_container_status_ready{namespace=%q,pod=%q,uid=\"u\",container=%q} %d\n", namespace, o.GetName()+
					"-5d8c-x2z", c.Name, ready)
			}
			if probes == 0 {
				p.t.Errorf("no container of the overlay %s is asked whether it is ready", overlay)
			}
			fmt.Fprintf(&b, "kube_deployment_status_replicas_available{namespace=%q,deployment=%q} %d\n", namespace, o.GetName(), available)
		}
	}
	h.Scrapes = append(h.Scrapes, scraped{h.now, ofKubeStateMetrics, b.String(), 0})
}

// TestAlertAboutTheDaemonSet: it fires if more than a tenth of the pods are not available, in the chart only with mode node and
// only for the DaemonSet of the release.
func TestAlertAboutTheDaemonSet(t *testing.T) {
	t.Parallel()
	const text = `kube_daemonset_status_desired_number_scheduled{namespace="n",daemonset="csi-controller"} 10
kube_daemonset_status_number_unavailable{namespace="n",daemonset="csi-controller"} %d
kube_daemonset_status_desired_number_scheduled{namespace="n",daemonset="another"} 10
kube_daemonset_status_number_unavailable{namespace="n",daemonset="another"} 10
`
	sources := map[string][]alert{"deploy/monitoring": alerts(t)}
	for _, release := range []string{"csi-controller", "second"} {
		for _, mode := range []string{"node", "all-in-one"} {
			sources[release+" "+mode] = chartAlerts(t, release, "csi.example.com", mode)
		}
	}
	for unavailable, fires := range map[int]bool{1: false, 2: true} {
		for source, all := range sources {
			h := newHistory()
			for range 20 {
				h.now += 60
				h.Scrapes = append(h.Scrapes, scraped{h.now, ofKubeStateMetrics, fmt.Sprintf(text, unavailable), 0})
			}
			h.Rules = nil
			for _, a := range all {
				lasts, err := time.ParseDuration(a.For)
				if err != nil {
					t.Fatal(err)
				}
				h.Rules = append(h.Rules, ruled{a.Expr, int64(lasts.Seconds())})
			}
			var got, want []string
			for i, series := range h.asked(t).Rules {
				if len(series) > 0 {
					got = append(got, all[i].Alert)
				}
			}
			if fires && (source == "deploy/monitoring" || source == "csi-controller node") {
				want = []string{"StorageControllerNodesUnavailable"}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s, %d of 10 pods are unavailable: %v fire, want %v", source, unavailable, got, want)
			}
		}
	}
}

// ofKubeStateMetrics is the labels of its metrics in addition to their own.
var ofKubeStateMetrics = map[string]string{"cluster": "one"}

// forbids has the API server refuse an operation, on objects for which the expression holds,
// until allow is called, by a policy as an administrator may have it.
func (e *env) forbids(operation admissionv1.OperationType, group, resource, expression string) (allow func()) {
	e.t.Helper()
	policies, bindings := e.client.AdmissionregistrationV1().ValidatingAdmissionPolicies(),
		e.client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings()
	name := metav1.ObjectMeta{Name: e.ns + "-" + resource}
	_, err := policies.Create(e.t.Context(), &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: name,
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
				RuleWithOperations: admissionv1.RuleWithOperations{
					Operations: []admissionv1.OperationType{operation},
					Rule:       admissionv1.Rule{APIGroups: []string{group}, APIVersions: []string{"v1"}, Resources: []string{resource}},
				}}}},
			MatchConditions: []admissionv1.MatchCondition{{Name: "ours", Expression: expression}},
			Validations:     []admissionv1.Validation{{Expression: "false", Message: policySays}},
		}}, metav1.CreateOptions{})
	e.must(err)
	allow = func() {
		_ = bindings.Delete(context.Background(), name.Name, metav1.DeleteOptions{})
		_ = policies.Delete(context.Background(), name.Name, metav1.DeleteOptions{})
	}
	e.t.Cleanup(allow)
	_, err = bindings.Create(e.t.Context(), &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: name,
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: name.Name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
			MatchResources: &admissionv1.MatchResources{MatchPolicy: ptr.To(admissionv1.Equivalent)},
		}}, metav1.CreateOptions{})
	e.must(err)
	return allow
}

const policySays = "a policy of this test refuses it"

// refused is nil when the policy was what refused a request.
func refused(err error) error {
	if err == nil || !strings.Contains(err.Error(), policySays) {
		return fmt.Errorf("the policy is not in force: %v", err)
	}
	return nil
}
