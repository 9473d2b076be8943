// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// restrict applies deploy/admission-policy to a ServiceAccount of the namespace of e, and waits until it is in force.
func (e *env) restrict(account string) {
	e.t.Helper()
	text, err := os.ReadFile("../../deploy/admission-policy/policy.yaml")
	e.must(err)
	adapted := strings.NewReplacer("csi.example.com", e.plugin.Name(),
		"system:serviceaccount:csi-example:csi-controller", "system:serviceaccount:"+e.ns+":"+account).Replace(string(text))
	objects := parsed(e.t, adapted)
	policy := converted[admissionv1.ValidatingAdmissionPolicy](e.t, objects[0])
	binding := converted[admissionv1.ValidatingAdmissionPolicyBinding](e.t, objects[1])
	policy.Name, binding.Name, binding.Spec.PolicyName = e.ns+"-account", e.ns+"-account", e.ns+"-account"
	policies, bindings := e.client.AdmissionregistrationV1().ValidatingAdmissionPolicies(),
		e.client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings()
	_, err = policies.Create(e.t.Context(), policy, metav1.CreateOptions{})
	e.must(err)
	_, err = bindings.Create(e.t.Context(), binding, metav1.CreateOptions{})
	e.must(err)
	e.t.Cleanup(func() {
		_ = bindings.Delete(context.Background(), binding.Name, metav1.DeleteOptions{})
		_ = policies.Delete(context.Background(), policy.Name, metav1.DeleteOptions{})
	})
	e.foreignVolume()
	client := e.impersonating(account)
	e.eventually("the policy is in force", func(ctx context.Context) error {
		return deniedByPolicy(client.CoreV1().PersistentVolumes().Delete(ctx, e.ns+"-foreign",
			metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}))
	})
}

// foreignVolume creates a PersistentVolume of another driver.
func (e *env) foreignVolume() {
	e.t.Helper()
	_, err := e.client.CoreV1().PersistentVolumes().Create(e.t.Context(), volumeOf(e.ns+"-foreign", "foreign.example.com"),
		metav1.CreateOptions{})
	e.must(err)
	e.t.Cleanup(func() {
		_ = e.client.CoreV1().PersistentVolumes().Delete(context.Background(), e.ns+"-foreign", metav1.DeleteOptions{})
	})
}

func volumeOf(name, driver string) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Capacity: newClaim("", "").Spec.Resources.Requests,
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: name}},
	}}
}

func (e *env) impersonating(account string) kubernetes.Interface {
	e.t.Helper()
	config := rest.CopyConfig(e.cp.Config())
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + e.ns + ":" + account,
		Groups: []string{"system:serviceaccounts", "system:authenticated"}}
	client, err := kubernetes.NewForConfig(config)
	e.must(err)
	return client
}

// deniedByPolicy returns nil if the policy denied the request.
func deniedByPolicy(err error) error {
	if err == nil {
		return errors.New("the request was allowed")
	}
	if !strings.Contains(err.Error(), "this ServiceAccount may") {
		return fmt.Errorf("the policy did not deny the request: %w", err)
	}
	return nil
}

// TestPolicyRestrictsTheServiceAccount: the account may write objects of its driver, and none of another driver.
// Its permissions allow both.
func TestPolicyRestrictsTheServiceAccount(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{}, 1)
	e.inForce("csi-controller", e.applyRendered(withComponents(t, "all-in-one", "rbac/nodecontroller-cleanup",
		"rbac/nodecontroller-node-finalizer", "rbac/nodecontroller-resize-nudge", "components/service-account")))
	e.restrict("csi-controller")
	ctx, client, core := t.Context(), e.impersonating("csi-controller"), e.client.CoreV1()
	for name, provisioner := range map[string]string{"ours": e.plugin.Name(), "foreign": "foreign.example.com", "static": ""} {
		c := newClaim(name, "none")
		if provisioner != "" {
			c.Annotations = map[string]string{"volume.kubernetes.io/storage-provisioner": provisioner}
		}
		e.make(c)
		if provisioner == "" {
			continue
		}
		_, err := e.client.StorageV1().VolumeAttachments().Create(ctx, &storagev1.VolumeAttachment{
			ObjectMeta: metav1.ObjectMeta{Name: e.ns + "-" + name}, Spec: storagev1.VolumeAttachmentSpec{Attacher: provisioner,
				NodeName: e.nodes[0], Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(e.ns + "-" + name)}},
		}, metav1.CreateOptions{})
		e.must(err)
		t.Cleanup(func() {
			_ = e.client.StorageV1().VolumeAttachments().Delete(context.Background(), e.ns+"-"+name, metav1.DeleteOptions{})
		})
	}
	_, err := core.PersistentVolumes().Create(ctx, volumeOf(e.ns+"-ours", e.plugin.Name()), metav1.CreateOptions{})
	e.must(err)
	t.Cleanup(func() {
		_ = core.PersistentVolumes().Delete(context.Background(), e.ns+"-ours", metav1.DeleteOptions{})
	})
	e.uses("user", "static", e.nodes[0])

	note, label := []byte(`{"metadata":{"annotations":{"a":"b"}}}`), []byte(`{"metadata":{"labels":{"a":"b"}}}`)
	dry, dryPatch := metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}, metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}
	volumes, claims := client.CoreV1().PersistentVolumes(), client.CoreV1().PersistentVolumeClaims(e.ns)
	writes := func(name string) map[string]error {
		errs := map[string]error{}
		_, errs["patch PV"] = volumes.Patch(ctx, e.ns+"-"+name, types.MergePatchType, note, dryPatch)
		errs["delete PV"] = volumes.Delete(ctx, e.ns+"-"+name, dry)
		_, errs["patch PVC"] = claims.Patch(ctx, name, types.MergePatchType, note, dryPatch)
		errs["delete PVC"] = claims.Delete(ctx, name, dry)
		attachments := client.StorageV1().VolumeAttachments()
		_, errs["patch VolumeAttachment"] = attachments.Patch(ctx, e.ns+"-"+name, types.MergePatchType, note, dryPatch)
		_, errs["patch VolumeAttachment status"] = attachments.Patch(ctx, e.ns+"-"+name, types.MergePatchType,
			[]byte(`{"status":{"attached":true}}`), dryPatch, "status")
		_, errs["create PV"] = volumes.Create(ctx, volumeOf(e.ns+"-new", map[string]string{"ours": e.plugin.Name(),
			"foreign": "foreign.example.com"}[name]), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return errs
	}
	migrated := func(source corev1.PersistentVolumeSource) error {
		pv := volumeOf(e.ns+"-new", e.plugin.Name())
		pv.Annotations = map[string]string{"pv.kubernetes.io/migrated-to": e.plugin.Name()}
		pv.Spec.PersistentVolumeSource = source
		_, err := volumes.Create(ctx, pv, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	for what, source := range map[string]corev1.PersistentVolumeSource{
		"another driver": {CSI: &corev1.CSIPersistentVolumeSource{Driver: "foreign.example.com", VolumeHandle: "v"}},
		"a host path":    {HostPath: &corev1.HostPathVolumeSource{Path: "/"}},
	} {
		if err := deniedByPolicy(migrated(source)); err != nil {
			t.Errorf("create a PV of %s that is said to be migrated: %v", what, err)
		}
	}
	for what, err := range writes("foreign") {
		if err := deniedByPolicy(err); err != nil {
			t.Errorf("%s of another driver: %v", what, err)
		}
	}
	allowed := writes("ours")
	allowed["create a migrated PV"] = migrated(corev1.PersistentVolumeSource{
		AWSElasticBlockStore: &corev1.AWSElasticBlockStoreVolumeSource{VolumeID: "vol-1"}})
	static := volumeOf(e.ns+"-static", "")
	static.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{
		AWSElasticBlockStore: &corev1.AWSElasticBlockStoreVolumeSource{VolumeID: "vol-2"}}
	if _, err := e.client.CoreV1().PersistentVolumes().Create(ctx, static, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	_, allowed["patch static in-tree PV"] = volumes.Patch(ctx, static.Name, types.MergePatchType, note, dryPatch)
	if err := deniedByPolicy(volumes.Delete(ctx, static.Name, dry)); err != nil {
		t.Errorf("delete static in-tree PV: %v", err)
	}
	allowed["delete static PVC"] = claims.Delete(ctx, "static", dry) // its driver is not in the object
	_, allowed["annotate pod"] = client.CoreV1().Pods(e.ns).Patch(ctx, "user", types.MergePatchType, note, dryPatch)
	_, allowed["annotate node"] = client.CoreV1().Nodes().Patch(ctx, e.nodes[0], types.MergePatchType, note, dryPatch)
	for what, err := range allowed {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, write := range map[string]func() error{
		"label pod": func() error {
			_, err := client.CoreV1().Pods(e.ns).Patch(ctx, "user", types.MergePatchType, label, dryPatch)
			return err
		},
		"cordon node": func() error {
			_, err := client.CoreV1().Nodes().Patch(ctx, e.nodes[0], types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`), dryPatch)
			return err
		},
	} {
		if err := deniedByPolicy(write()); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
