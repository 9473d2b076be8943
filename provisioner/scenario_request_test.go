// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// variant is a claim with a class of its own, and what becomes of it: check, or an
// event with all of fails and not a single call.
type variant struct {
	class func(*storagev1.StorageClass)
	claim func(*corev1.PersistentVolumeClaim)
	fails []string
	check func(outcome) bool
}

// outcome is what the driver was asked for a claim, once, and what was saved.
type outcome struct {
	claim   *corev1.PersistentVolumeClaim
	request *csi.CreateVolumeRequest
	pv      *corev1.PersistentVolume
}

func (o outcome) fsType() string { return o.request.VolumeCapabilities[0].GetMount().GetFsType() }

func (o outcome) modes() string {
	var modes []string
	for _, c := range o.request.VolumeCapabilities {
		modes = append(modes, c.AccessMode.Mode.String())
	}
	return strings.Join(modes, " ")
}

// secrets is "namespace/name" of the secrets that the volume names, by what for.
func (o outcome) secrets() map[string]string {
	all := map[string]string{}
	for use, ref := range map[string]*corev1.SecretReference{
		"publish": o.pv.Spec.CSI.ControllerPublishSecretRef, "node-stage": o.pv.Spec.CSI.NodeStageSecretRef,
		"node-publish": o.pv.Spec.CSI.NodePublishSecretRef,
		"expand":       o.pv.Spec.CSI.ControllerExpandSecretRef, "node-expand": o.pv.Spec.CSI.NodeExpandSecretRef,
	} {
		if ref != nil {
			all[use] = ref.Namespace + "/" + ref.Name
		}
	}
	for use, prefix := range map[string]string{"delete": "provisioner-deletion", "modify": "controller-modify"} {
		name, named := o.pv.Annotations["volume.kubernetes.io/"+prefix+"-secret-name"]
		namespace, spaced := o.pv.Annotations["volume.kubernetes.io/"+prefix+"-secret-namespace"]
		switch {
		case named && spaced:
			all[use] = namespace + "/" + name
		case named || spaced:
			all[use] = "one annotation of two"
		}
	}
	return all
}

// variants has all of them provisioned side by side.
func (f *fixture) variants(all map[string]variant) {
	f.Helper()
	var seen []string // events
	want := f.Plugin.Count(create)
	claims, classes := map[string]*corev1.PersistentVolumeClaim{}, map[string]string{}
	for name, v := range all {
		g := *f
		g.class = f.Namespace + "-" + strings.ReplaceAll(name, "_", "-")
		classes[name] = g.class
		g.makeClass(v.class)
		claims[name] = g.claim(func(c *corev1.PersistentVolumeClaim) {
			c.Name = strings.ReplaceAll(name, "_", "-")
			if v.claim != nil {
				v.claim(c)
			}
		})
		if v.check != nil {
			want++
		}
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		v := all[name]
		f.Run(name, func(t *testing.T) {
			g := *f
			g.Fixture = f.In(t)
			if v.check == nil {
				g.failsTwice(&seen,
					append([]string{fmt.Sprintf("Warning ProvisioningFailed failed to provision volume with StorageClass %q",
						classes[name])}, v.fails...))
				return
			}
			if o := g.outcome(claims[name]); !v.check(o) {
				t.Errorf("request %v\nclaim %+v\nvolume %+v", o.request, o.claim, o.pv)
			}
		})
	}
	f.Calls(create, want)
}

// failsTwice waits until two events have all of parts: what fails is tried again.
func (f *fixture) failsTwice(seen *[]string, parts []string) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("two events have all of %q", parts), func(context.Context) error {
		for len(f.events.Events) > 0 {
			*seen = append(*seen, <-f.events.Events)
		}
		found, alike := 0, []string{}
		for _, e := range *seen {
			if !strings.HasPrefix(e, parts[0]) {
				continue
			}
			alike = append(alike, e)
			if !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(e, p) }) {
				found++
			}
		}
		if found < 2 {
			return fmt.Errorf("%d have, of %q", found, alike)
		}
		return nil
	})
}

// outcome waits for the volume of a claim, whatever its name.
func (f *fixture) outcome(claim *corev1.PersistentVolumeClaim) outcome {
	f.Helper()
	o := outcome{claim: claim}
	kubetest.Eventually(f.T, "the volume of "+claim.Name+" is saved", func(ctx context.Context) error {
		list, err := f.Client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, pv := range list.Items {
			if pv.Spec.ClaimRef.UID == claim.UID {
				o.pv = &pv
				return nil
			}
		}
		return errors.New("there is none")
	})
	for _, call := range f.Plugin.Calls(create) {
		if r := call.Request.(*csi.CreateVolumeRequest); r.Name == o.pv.Name {
			if o.request != nil {
				f.Errorf("volume %s was asked for twice", r.Name)
			}
			o.request = r
		}
	}
	if o.request == nil {
		f.Fatalf("CreateVolume was not called for volume %s", o.pv.Name)
	}
	return o
}

// secret names a secret in the parameters of a class; kind is "" for the default.
func secret(kind, namespace, name string) map[string]string {
	return map[string]string{volumerules.ParameterPrefix + kind + "secret-name": name, volumerules.ParameterPrefix + kind +
		"secret-namespace": namespace}
}

func with(m map[string]string, more map[string]string) map[string]string {
	m = maps.Clone(m)
	maps.Copy(m, more)
	return m
}

func modes(modes ...corev1.PersistentVolumeAccessMode) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) { c.Spec.AccessModes = modes }
}

func annotated(annotations map[string]string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) { maps.Copy(c.Annotations, annotations) }
}

func attributes(class string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeAttributesClassName = &class }
}

func (f *fixture) makeSecret(name string, data map[string]string) {
	f.Helper()
	_, err := f.Client.CoreV1().Secrets(f.Namespace).Create(f.Context(),
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, StringData: data}, metav1.CreateOptions{})
	f.Must(err)
}

func (f *fixture) makeAttributesClass(name, driver string, parameters map[string]string) {
	f.Helper()
	_, err := f.Client.StorageV1().VolumeAttributesClasses().Create(f.Context(),
		&storagev1.VolumeAttributesClass{ObjectMeta: metav1.ObjectMeta{Name: name}, DriverName: driver, Parameters: parameters},
		metav1.CreateOptions{})
	f.Must(err)
}

var looks atomic.Int64

// looksAtAll is settles for where claims of the class have failed before, and more than once.
func (f *fixture) looksAtAll() {
	f.Helper()
	n := looks.Add(1)
	g := *f
	g.class = fmt.Sprint(f.class, "-look-", n) // there is none
	g.claim(func(c *corev1.PersistentVolumeClaim) { c.Name = fmt.Sprint("look-", n) })
	kubetest.Eventually(f.T, "the queue has come to a later claim", func(context.Context) error {
		if testutil.ToFloat64(f.c.metrics.provisionFailed.WithLabelValues(g.class, "")) < 1 {
			return errors.New("it has not")
		}
		return nil
	})
}

// makeVolume makes a PersistentVolume for a claim, as an earlier process would have.
func (f *fixture) makeVolume(name string, claim *corev1.PersistentVolumeClaim) {
	f.Helper()
	_, err := f.Client.CoreV1().PersistentVolumes().Create(f.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{AccessModes: claim.Spec.AccessModes, Capacity: claim.Spec.Resources.Requests,
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			ClaimRef:                      &corev1.ObjectReference{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: f.Driver,
				VolumeHandle: "x"}}},
	}, metav1.CreateOptions{})
	f.Must(err)
}

func capabilities(more ...csi.ControllerServiceCapability_RPC_Type) csitest.Config {
	return csitest.Config{Controller: append(more, csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME)}
}

func provisionerScenarioRequest(t *testing.T) {
	const p = volumerules.ParameterPrefix
	t.Run("request", func(t *testing.T) {
		scenario(t, csitest.Config{}, nil).variants(map[string]variant{
			"024_selector": {claim: func(c *corev1.PersistentVolumeClaim) { c.Spec.Selector = &metav1.LabelSelector{} },
				fails: []string{"selector"}},
			"026_name": {check: func(o outcome) bool {
				return o.request.Name == "pvc-"+string(o.claim.UID) && o.pv.Name == o.request.Name
			}},
			"027_size": {claim: func(c *corev1.PersistentVolumeClaim) {
				c.Spec.Resources.Requests[corev1.ResourceStorage] = resource.MustParse("1500M")
				c.Spec.Resources.Limits = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("3G")}
			}, check: func(o outcome) bool {
				return o.request.CapacityRange.RequiredBytes == 1_500_000_000 && o.request.CapacityRange.LimitBytes == 0
			}},
			"028_fstype": {class: parameters(map[string]string{"a": "1", p + "fstype": "xfs"}), check: func(o outcome) bool {
				return cmp.Equal(o.request.Parameters, map[string]string{"a": "1"}) && o.fsType() == "xfs" && o.pv.Spec.CSI.FSType == "xfs"
			}},
			"029_old_fstype": {class: parameters(map[string]string{"FSType": "ext3"}), check: func(o outcome) bool {
				return cmp.Equal(o.request.Parameters, map[string]string{"FSType": "ext3"}) && o.fsType() == "ext3"
			}},
			"030_both_fstypes": {class: parameters(map[string]string{"fstype": "a", p + "fstype": "b"}),
				fails: []string{"fstype", p + "fstype"}},
			"030_two_spellings": {class: parameters(map[string]string{"fstype": "a", "fsType": "a"}),
				fails: []string{"fstype", "fsType"}},
			"031_reserved_parameter":    {class: parameters(map[string]string{p + "fsType": "xfs"}), fails: []string{p + "fsType"}},
			"038_metadata_in_the_class": {class: parameters(map[string]string{p + "pvc/name": "x"}), fails: []string{p + "pvc/name"}},
			"032_no_file_system": {check: func(o outcome) bool {
				return o.fsType() == "" && o.pv.Spec.CSI.FSType == "" && len(o.request.Parameters) == 0
			}},
			"033_block": {class: parameters(map[string]string{p + "fstype": "xfs"}), claim: block, check: isBlockDevice},
			"034_mount_options": {class: func(c *storagev1.StorageClass) { c.MountOptions = []string{"ro", "noatime"} },
				check: hasMountOptions},
			"035_read_write_once": {claim: modes(corev1.ReadWriteOnce),
				check: func(o outcome) bool { return o.modes() == "SINGLE_NODE_WRITER" }},
			"035_read_write_once_pod": {claim: modes(corev1.ReadWriteOncePod),
				check: func(o outcome) bool { return o.modes() == "SINGLE_NODE_WRITER" }},
			"035_read_only_many": {claim: modes(corev1.ReadOnlyMany),
				check: func(o outcome) bool { return o.modes() == "MULTI_NODE_READER_ONLY" }},
			"035_read_write_many": {claim: modes(corev1.ReadWriteMany),
				check: func(o outcome) bool { return o.modes() == "MULTI_NODE_MULTI_WRITER" }},
			"036_two_modes": {claim: modes(corev1.ReadWriteOnce, corev1.ReadOnlyMany),
				check: func(o outcome) bool { return o.modes() == "SINGLE_NODE_WRITER MULTI_NODE_READER_ONLY" }},
			"036_two_modes_other_order": {claim: modes(corev1.ReadOnlyMany, corev1.ReadWriteOnce),
				check: func(o outcome) bool { return o.modes() == "MULTI_NODE_READER_ONLY SINGLE_NODE_WRITER" }},
			"050_driver_does_not_modify": {claim: attributes("any"), fails: []string{"any", "MODIFY_VOLUME"}},
		})
	})
	t.Run("request_with_flags", func(t *testing.T) {
		f := scenario(t, capabilities(csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER), func(c *Config) {
			c.VolumeNamePrefix, c.VolumeNameUUIDLength, c.DefaultFSType, c.ExtraCreateMetadata, c.SecretNamespaces = "v", 8, "ext4", true,
				[]string{"infra"}
		})
		f.variants(map[string]variant{
			"026_short_name": {check: func(o outcome) bool {
				return o.request.Name == "v-"+string(o.claim.UID)[:8] && o.pv.Name == o.request.Name
			}},
			"032_default_file_system": {check: func(o outcome) bool { return o.fsType() == "ext4" && o.pv.Spec.CSI.FSType == "ext4" }},
			"032_class_before_default": {class: parameters(map[string]string{p + "fstype": "xfs"}), check: func(o outcome) bool {
				return o.fsType() == "xfs" && o.pv.Spec.CSI.FSType == "xfs"
			}},
			"033_block_and_default": {claim: block, check: isBlockDevice},
			"035_read_write_once": {claim: modes(corev1.ReadWriteOnce),
				check: func(o outcome) bool { return o.modes() == "SINGLE_NODE_MULTI_WRITER" }},
			"035_read_write_once_pod": {claim: modes(corev1.ReadWriteOncePod),
				check: func(o outcome) bool { return o.modes() == "SINGLE_NODE_SINGLE_WRITER" }},
			"035_read_only_many": {claim: modes(corev1.ReadOnlyMany),
				check: func(o outcome) bool { return o.modes() == "MULTI_NODE_READER_ONLY" }},
			"035_read_write_many": {claim: modes(corev1.ReadWriteMany),
				check: func(o outcome) bool { return o.modes() == "MULTI_NODE_MULTI_WRITER" }},
			"037_extra_metadata": {class: parameters(map[string]string{"a": "1"}), check: func(o outcome) bool {
				return cmp.Equal(o.request.Parameters,
					map[string]string{"a": "1", p + "pvc/name": o.claim.Name, p + "pvc/namespace": f.Namespace, p + "pv/name": o.pv.Name})
			}},
			"secret_of_a_namespace_that_is_not_admitted": {class: parameters(secret("node-stage-", "${pvc.namespace}", "s")),
				fails: []string{"--secret-namespaces"}},
		})
		f.Run("025_volume_exists", func(t *testing.T) {
			claim := f.claim(nil)
			name := "v-" + string(claim.UID)[:8]
			f.makeVolume(name, claim)
			kubetest.Eventually(t, "the watch has delivered the PersistentVolume", func(context.Context) error {
				if _, ok := f.c.volumes.Get(name); !ok {
					return errors.New("it has not")
				}
				return nil
			})
			before := f.Plugin.Count(create)
			f.makeClass(nil)
			f.looksAtAll()
			f.Calls(create, before)
		})
	})
	t.Run("secrets", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeSecret("sec", map[string]string{"k": "v"})
		f.makeSecret("empty", nil)
		everywhere := map[string]string{}
		for _, use := range []string{"publish", "node-stage", "node-publish", "expand", "node-expand", "delete", "modify"} {
			everywhere[use] = f.Namespace + "/sec"
		}
		are := func(want map[string]string) func(outcome) bool {
			return func(o outcome) bool { return cmp.Equal(o.secrets(), want) }
		}
		const template = "${pv.name}-${pvc.namespace}-${pvc.name}-${pvc.annotations['team/x']}"
		all := map[string]variant{
			"040_none": {check: func(o outcome) bool {
				return cmp.Equal(o.secrets(), map[string]string{"delete": "/"}) && len(o.request.Secrets) == 0
			}},
			"039_without_data": {class: parameters(secret("provisioner-", f.Namespace, "empty")),
				check: are(map[string]string{"delete": f.Namespace + "/empty"})},
			"041_default": {class: parameters(secret("", f.Namespace, "sec")), check: func(o outcome) bool {
				return cmp.Equal(o.secrets(), everywhere) && cmp.Equal(o.request.Secrets, map[string]string{"k": "v"}) &&
					len(o.request.Parameters) == 0
			}},
			"042_default_and_one_kind": {class: parameters(with(secret("", f.Namespace, "sec"), secret("node-stage-", "infra", "stage"))),
				check: are(with(everywhere, map[string]string{"node-stage": "infra/stage"}))},
			"043_empty_name": {class: parameters(secret("node-publish-", f.Namespace, "")),
				fails: []string{p + "node-publish-secret-name", "empty"}},
			"043_empty_namespace": {class: parameters(secret("node-publish-", "", "sec")),
				fails: []string{p + "node-publish-secret-namespace", "empty"}},
			"043_two_names": {class: parameters(with(secret("provisioner-", f.Namespace, "sec"),
				map[string]string{"csiProvisionerSecretName": "sec"})),
				fails: []string{p + "provisioner-secret-name", "csiProvisionerSecretName"}},
			"044_old_name": {class: parameters(map[string]string{"csiProvisionerSecretName": "sec", p +
				"provisioner-secret-namespace": f.Namespace}), check: func(o outcome) bool {
				return cmp.Equal(o.secrets(), map[string]string{"delete": f.Namespace + "/sec"}) && o.request.Secrets["k"] == "v" &&
					cmp.Equal(o.request.Parameters, map[string]string{"csiProvisionerSecretName": "sec"})
			}},
			"045_template": {class: parameters(secret("node-publish-", "${pvc.namespace}", template)),
				claim: annotated(map[string]string{"team/x": "gold"}), check: func(o outcome) bool {
					return cmp.Equal(o.secrets(), map[string]string{"delete": "/",
						"node-publish": fmt.Sprintf("%s/%s-%s-%s-gold", f.Namespace, o.pv.Name, f.Namespace, o.claim.Name)})
				}},
			"045_template_of_a_volume": {class: parameters(secret("controller-expand-", "${pv.name}", "x")),
				check: func(o outcome) bool { return o.secrets()["expand"] == o.pv.Name+"/x" }},
			"045_no_annotation": {class: parameters(secret("node-publish-", f.Namespace, template)),
				fails: []string{"pvc.annotations['team/x']"}},
			"046_name_in_the_namespace": {class: parameters(secret("node-publish-", "${pvc.name}", "sec")), fails: []string{"pvc.name"}},
			"047_bad_name": {class: parameters(secret("provisioner-", f.Namespace, "${pvc.annotations['team/x']}")),
				claim: annotated(map[string]string{"team/x": "Bad_Name"}),
				fails: []string{`"${pvc.annotations['team/x']}"`, `"Bad_Name"`}},
			"047_bad_namespace": {class: parameters(secret("node-stage-", "${pvc.namespace}.x", "sec")),
				fails: []string{`"${pvc.namespace}.x"`, fmt.Sprintf("%q", f.Namespace+".x")}},
		}
		for _, kind := range []string{"", "provisioner-", "controller-publish-", "node-stage-", "node-publish-", "controller-expand-",
			"node-expand-", "controller-modify-"} {
			half := p + kind + "secret-name"
			all["043_only_a_name_of_"+kind+"secret"] = variant{class: parameters(map[string]string{half: "sec"}), fails: []string{half}}
		}
		f.variants(all)
	})
	t.Run("attributes_class", func(t *testing.T) {
		f := scenario(t, capabilities(csi.ControllerServiceCapability_RPC_MODIFY_VOLUME), nil)
		gold, others, missing := f.Namespace+"-gold", f.Namespace+"-others", f.Namespace+"-missing"
		f.makeAttributesClass(gold, f.Driver, map[string]string{"iops": "9"})
		f.makeAttributesClass(others, "other.example.com", map[string]string{"iops": "9"})
		f.variants(map[string]variant{
			"049_honoured": {claim: attributes(gold), check: func(o outcome) bool {
				return cmp.Equal(o.request.MutableParameters, map[string]string{"iops": "9"}) && len(o.request.Parameters) == 0 &&
					ptr.Deref(o.pv.Spec.VolumeAttributesClassName, "") == gold
			}},
			"049_no_name":         {claim: attributes(""), check: hasNoAttributes},
			"050_of_other_driver": {claim: attributes(others), fails: []string{others, "other.example.com"}},
			"050_missing":         {claim: attributes(missing), fails: []string{missing, "not found"}},
		})
		f.Run("050_comes_later", func(t *testing.T) {
			f.makeClass(nil)
			claim := f.claim(attributes(f.Namespace + "-later"))
			f.event("ProvisioningFailed", f.Namespace+"-later")
			f.makeAttributesClass(f.Namespace+"-later", f.Driver, map[string]string{"iops": "9"})
			f.saved(claim)
		})
	})
	t.Run("attributes_class_gate_off", func(t *testing.T) {
		f := scenario(t, capabilities(csi.ControllerServiceCapability_RPC_MODIFY_VOLUME),
			func(c *Config) { c.VolumeAttributesClass = false })
		gold := f.Namespace + "-gold"
		f.makeAttributesClass(gold, f.Driver, map[string]string{"iops": "9"})
		f.variants(map[string]variant{
			"051_ignored":         {claim: attributes(gold), check: hasNoAttributes},
			"051_missing_ignored": {claim: attributes(f.Namespace + "-missing"), check: hasNoAttributes},
		})
	})
}

func isBlockDevice(o outcome) bool {
	return o.request.VolumeCapabilities[0].GetBlock() != nil && o.request.VolumeCapabilities[0].GetMount() == nil &&
		o.pv.Spec.CSI.FSType == "" && *o.pv.Spec.VolumeMode == corev1.PersistentVolumeBlock
}

func hasMountOptions(o outcome) bool {
	want := []string{"ro", "noatime"}
	return cmp.Equal(o.request.VolumeCapabilities[0].GetMount().MountFlags, want) && cmp.Equal(o.pv.Spec.MountOptions, want)
}

func hasNoAttributes(o outcome) bool {
	return o.request.MutableParameters == nil && o.pv.Spec.VolumeAttributesClassName == nil
}
