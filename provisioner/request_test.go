// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"crypto/sha256"
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/topology"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

func block(c *corev1.PersistentVolumeClaim) {
	c.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock)
}

func parameters(p map[string]string) func(*storagev1.StorageClass) {
	return func(c *storagev1.StorageClass) { c.Parameters = p }
}

func TestPrepare(t *testing.T) {
	tests := map[string]struct {
		driver func(*driver)
		claim  func(*corev1.PersistentVolumeClaim)
		class  func(*storagev1.StorageClass)
		check  func(*csi.CreateVolumeRequest, plan) bool
		err    string
	}{
		"name and size": {check: func(r *csi.CreateVolumeRequest, _ plan) bool {
			return r.Name == "pvc-"+uid && r.CapacityRange.RequiredBytes == 1_500_000_000 && r.CapacityRange.LimitBytes == 0 &&
				r.AccessibilityRequirements == nil
		}},
		"name of eight characters": {driver: func(d *driver) { d.VolumeNamePrefix, d.VolumeNameUUIDLength = "v", 8 },
			check: func(r *csi.CreateVolumeRequest, p plan) bool {
				return r.Name == "v-01234567" && p.VolumeName == r.Name
			}},
		"no size": {claim: func(c *corev1.PersistentVolumeClaim) { c.Spec.Resources.Requests = nil },
			check: func(r *csi.CreateVolumeRequest, _ plan) bool {
				return r.CapacityRange.RequiredBytes == 0
			}},
		"size beyond int64": {claim: func(c *corev1.PersistentVolumeClaim) {
			c.Spec.Resources.Requests[corev1.ResourceStorage] = resource.MustParse("10E")
		}, err: "spec.resources.requests.storage: 10E is more than the 9223372036854775807 bytes"},
		"reserved parameters are for us": {class: parameters(map[string]string{"a": "1", volumerules.ParameterPrefix + "fstype": "xfs"}),
			check: func(r *csi.CreateVolumeRequest, p plan) bool {
				return cmp.Equal(r.Parameters, map[string]string{"a": "1"}) && r.VolumeCapabilities[0].GetMount().FsType == "xfs" &&
					p.FSType == "xfs"
			}},
		"old fstype is for both": {class: parameters(map[string]string{"FSType": "ext3"}),
			check: func(r *csi.CreateVolumeRequest, p plan) bool {
				return r.Parameters["FSType"] == "ext3" && p.FSType == "ext3"
			}},
		"two file systems": {class: parameters(map[string]string{"fstype": "a", volumerules.ParameterPrefix + "fstype": "b"}),
			err: "set only one of them"},
		"two spellings": {class: parameters(map[string]string{"fstype": "a", "fsType": "a"}), err: "set only one of them"},
		"unknown reserved parameter": {class: parameters(map[string]string{volumerules.ParameterPrefix + "fsType": "xfs"}),
			err: `parameter "csi.storage.k8s.io/fsType": unknown. Use "csi.storage.k8s.io/fstype"`},
		"reserved parameter with a colon": {class: parameters(map[string]string{volumerules.ParameterPrefix + "fstype:": "xfs"}),
			err: `parameter "csi.storage.k8s.io/fstype:": unknown. Use "csi.storage.k8s.io/fstype"`},
		"extra metadata in the class": {class: parameters(map[string]string{volumerules.ParameterPrefix + "pvc/name": "x"}),
			err: volumerules.ParameterPrefix + "pvc/name"},
		"default file system": {driver: func(d *driver) { d.DefaultFSType = "ext4" },
			check: func(_ *csi.CreateVolumeRequest, p plan) bool { return p.FSType == "ext4" }},
		"default for an empty one": {driver: func(d *driver) { d.DefaultFSType = "ext4" },
			class: parameters(map[string]string{"fstype": ""}),
			check: func(_ *csi.CreateVolumeRequest, p plan) bool { return p.FSType == "ext4" }},
		"a block device has none": {driver: func(d *driver) { d.DefaultFSType = "ext4" }, claim: block,
			check: func(r *csi.CreateVolumeRequest, p plan) bool {
				return p.FSType == "" && r.VolumeCapabilities[0].GetBlock() != nil
			}},
		"mount options keep their order": {class: func(c *storagev1.StorageClass) { c.MountOptions = []string{"ro", "noatime"} },
			check: func(r *csi.CreateVolumeRequest, _ plan) bool {
				return cmp.Equal(r.VolumeCapabilities[0].GetMount().MountFlags, []string{"ro", "noatime"})
			}},
		"extra metadata": {driver: func(d *driver) { d.ExtraCreateMetadata = true }, check: func(r *csi.CreateVolumeRequest, _ plan) bool {
			return cmp.Equal(r.Parameters, map[string]string{volumerules.ParameterPrefix + "pvc/name": "data", volumerules.ParameterPrefix +
				"pvc/namespace": "ns", volumerules.ParameterPrefix + "pv/name": "pvc-" + uid})
		}},
		"modes keep their order": {claim: func(c *corev1.PersistentVolumeClaim) {
			c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany}
		}, check: func(r *csi.CreateVolumeRequest, _ plan) bool {
			return len(r.VolumeCapabilities) == 2 &&
				r.VolumeCapabilities[0].AccessMode.Mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER &&
				r.VolumeCapabilities[1].AccessMode.Mode == csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
		}},
		"unknown mode": {claim: func(c *corev1.PersistentVolumeClaim) {
			c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{"Some"}
		}, err: `"Some"`},
		"snapshot": {claim: func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ptr.To(volumerules.SnapshotGroup), Kind: "VolumeSnapshot",
				Name: "s"}
		}, err: "CREATE_DELETE_SNAPSHOT"},
		"snapshot of another group": {claim: func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ptr.To("x"), Kind: "VolumeSnapshot", Name: "s"}
		}, err: "API group"},
		"clone": {claim: func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "s"}
		}, err: "CLONE_VOLUME"},
		"kind of the same name": {claim: func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: ptr.To("x"), Kind: "PersistentVolumeClaim", Name: "s"}
		}, err: "populator"},
		"attributes class": {claim: func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeAttributesClassName = ptr.To("gold") },
			err: `"gold"`},
		"empty attributes class": {claim: func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeAttributesClassName = ptr.To("") },
			check: func(*csi.CreateVolumeRequest, plan) bool { return true }},
		"class by the old annotation": {claim: func(c *corev1.PersistentVolumeClaim) {
			c.Annotations[corev1.BetaStorageClassAnnotation] = "old"
		}, check: func(_ *csi.CreateVolumeRequest, p plan) bool { return p.ClassName == "old" }},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			d := testDriver(tt.driver)
			claim, class := testClaim(tt.claim), testClass(tt.class)
			o, err := d.prepare(claim, class, "", nil, d.requirementFor(claim, class, "", topology.NewAggregate()))
			if refused := d.check(claim, class); refused != nil {
				err = refused
			}
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("got %v, want an error with %q", err, tt.err)
				}
				return
			}
			if err != nil || !tt.check(o.request, o.plan) {
				t.Errorf("%v: %v, %+v", err, o.request, o.plan)
			}
		})
	}
}

func TestAccessModes(t *testing.T) {
	const (
		writer  = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
		multi   = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		single  = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
		reader  = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
		writers = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	)
	for mode, want := range map[corev1.PersistentVolumeAccessMode][2]csi.VolumeCapability_AccessMode_Mode{
		corev1.ReadWriteOnce: {writer, multi}, corev1.ReadWriteOncePod: {writer, single}, corev1.ReadOnlyMany: {reader, reader},
		corev1.ReadWriteMany: {writers, writers},
	} {
		for i, has := range []bool{false, true} {
			d := testDriver(func(d *driver) { d.caps.SingleNodeMultiWriter = has })
			got, err := d.capabilities(plan{AccessModes: []corev1.PersistentVolumeAccessMode{mode}})
			if err != nil || len(got) != 1 || got[0].GetAccessMode().GetMode() != want[i] {
				t.Errorf("%s, SINGLE_NODE_MULTI_WRITER %t: %v, %v", mode, has, got, err)
			}
		}
	}
}

func TestConfigValidate(t *testing.T) {
	if err := DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
	for flag, changes := range map[string][]func(*Config){
		"--timeout":              {func(c *Config) { c.Timeout = 0 }},
		"--retry-interval-start": {func(c *Config) { c.RetryIntervalStart = -1 }},
		"--retry-interval-max":   {func(c *Config) { c.RetryIntervalMax = 0 }},
		"--worker-threads":       {func(c *Config) { c.WorkerThreads = 0 }},
		"--volume-name-prefix": {
			func(c *Config) { c.VolumeNamePrefix = "" }, func(c *Config) { c.VolumeNamePrefix = "My_Volume" },
			func(c *Config) { c.VolumeNamePrefix = "pvc." },
			func(c *Config) { c.VolumeNamePrefix = strings.Repeat("a", 217) },
		},
		"--volume-name-uuid-length": {
			func(c *Config) { c.VolumeNameUUIDLength = 40 }, func(c *Config) { c.VolumeNameUUIDLength = 0 },
			func(c *Config) { c.VolumeNameUUIDLength = -2 },
		},
		"--provisioning-protection":    {func(c *Config) { c.ProvisioningProtection = "some" }},
		"--cloning-protection-threads": {func(c *Config) { c.CloningProtectionThreads = 0 }},
		"--node-deployment":            {func(c *Config) { c.NodeDeployment = true }},
		"--node-deployment-base-delay": {func(c *Config) { c.NodeDeployment, c.NodeName, c.NodeDeploymentBaseDelay = true, "n", 0 }},
		"--node-deployment-max-delay":  {func(c *Config) { c.NodeDeployment, c.NodeName, c.NodeDeploymentMaxDelay = true, "n", 0 }},
	} {
		for i, change := range changes {
			cfg := DefaultConfig()
			change(&cfg)
			if err := cfg.Validate(); err == nil || !strings.HasPrefix(err.Error(), flag+":") {
				t.Errorf("%s, change %d: got %v", flag, i, err)
			}
		}
	}
	all := DefaultConfig()
	all.Timeout, all.WorkerThreads, all.VolumeNamePrefix = 0, 0, ""
	if err := all.Validate(); err == nil || strings.Count(err.Error(), "--") < 3 {
		t.Errorf("not all that is wrong is told: %v", err)
	}
}

// FuzzVolumeName gives names that the API server takes, for every prefix and length
// that an operator is allowed to set.
func FuzzVolumeName(f *testing.F) {
	f.Add("pvc", -1, []byte("0123456789abcdef"))
	f.Add("v", 8, []byte(""))
	f.Add("My_Prefix", 32, []byte("x"))
	f.Add(strings.Repeat("a", 240), -1, []byte("x"))
	f.Fuzz(func(t *testing.T, prefix string, length int, random []byte) {
		c := DefaultConfig()
		c.VolumeNamePrefix, c.VolumeNameUUIDLength = prefix, length
		if c.Validate() != nil {
			return
		}
		id := uuid.NewHash(sha256.New(), uuid.Nil, random, 4).String()
		name := c.volumeName(types.UID(id))
		if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
			t.Errorf("%q: %v", name, problems)
		}
		rest, ok := strings.CutPrefix(name, prefix+"-")
		plain := strings.ReplaceAll(id, "-", "")
		if !ok || length < 0 && rest != id || length >= 0 && rest != plain[:length] {
			t.Errorf("prefix %q and %d characters of %q give %q", prefix, length, id, name)
		}
	})
}

// FuzzPrepare never passes a reserved parameter on, always asks for one name, and asks
// the same when it is asked again.
func FuzzPrepare(f *testing.F) {
	f.Add("csi.storage.k8s.io/fstype", "xfs", "ReadWriteOnce", int64(5), "", false)
	f.Add("csiProvisionerSecretName", "${pvc.name}", "", int64(-1), "z1", true)
	f.Fuzz(func(t *testing.T, key, value, mode string, size int64, zone string, selected bool) {
		d := testDriver(func(d *driver) { d.topology = zone != "" })
		claim := testClaim(func(c *corev1.PersistentVolumeClaim) {
			c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.PersistentVolumeAccessMode(mode)}
			c.Spec.Resources.Requests[corev1.ResourceStorage] = *resource.NewQuantity(size, resource.BinarySI)
		})
		class, node := testClass(parameters(map[string]string{key: value})), ""
		if selected {
			node = "node-0"
		}
		known := world([]string{"zone"}, map[string]string{"zone": zone}, map[string]string{"zone": "a"}, map[string]string{"zone": "b"})
		refs := &resolvedRefs{mutable: map[string]string{key: value}}
		o, err := d.prepare(claim, class, node, refs, d.requirementFor(claim, class, node, known))
		if err != nil {
			return
		}
		request, p := o.request, o.plan
		if request.GetName() != "pvc-"+uid || p.VolumeName != request.GetName() || p.SelectedNode != node {
			t.Errorf("name %q, %+v", request.GetName(), p)
		}
		for k := range request.GetParameters() {
			if strings.HasPrefix(k, volumerules.ParameterPrefix) {
				t.Errorf("parameter %q is passed on", k)
			}
		}
		if !maps.Equal(request.GetMutableParameters(), refs.mutable) {
			t.Errorf("mutable parameters %v", request.GetMutableParameters())
		}
		preferred := request.GetAccessibilityRequirements().GetPreferred()
		if d.topology != (len(preferred) > 0) || selected && d.topology && preferred[0].GetSegments()["zone"] != zone {
			t.Errorf("topology %t, node selected %t: %v", d.topology, selected, preferred)
		}
		again, err := d.prepare(claim, class, node, refs, d.requirementFor(claim, class, node, known))
		if err != nil || !proto.Equal(request, again.request) {
			t.Errorf("%v, then %v, %v", request, again.request, err)
		}
	})
}

func TestVolumeOf(t *testing.T) {
	d := testDriver(func(d *driver) { d.topology, d.ControllerPublishReadonly = true, true })
	secret := &corev1.SecretReference{Namespace: "n", Name: "s"}
	claim := testClaim(func(c *corev1.PersistentVolumeClaim) {
		c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
	})
	class := testClass(func(c *storagev1.StorageClass) {
		c.ReclaimPolicy, c.MountOptions = ptr.To(corev1.PersistentVolumeReclaimDelete), []string{"noatime"}
	})
	o, err := d.prepare(claim, class, "", nil, func() (*csi.TopologyRequirement, error) { return nil, nil })
	if err != nil {
		t.Fatal(err)
	}
	o.plan.Secrets = volumerules.Secrets{Provisioner: secret, ControllerPublish: secret, NodeStage: secret, NodePublish: secret,
		ControllerExpand: secret, NodeExpand: secret, ControllerModify: secret}
	pv := d.volumeOf(o, &csi.Volume{VolumeId: "vol-1", CapacityBytes: 5905580032,
		VolumeContext:      map[string]string{"a": "b"},
		AccessibleTopology: []*csi.Topology{{Segments: map[string]string{"zone": "z1"}}}})
	wantAnnotations := map[string]string{
		storagehelpers.AnnDynamicallyProvisioned: "drv.example.com", volumerules.AnnDeletionSecretName: "s",
		volumerules.AnnDeletionSecretNamespace: "n", volumerules.AnnModifySecretName: "s", volumerules.AnnModifySecretNamespace: "n",
	}
	capacity := pv.Spec.Capacity[corev1.ResourceStorage]
	source := pv.Spec.CSI
	for name, ok := range map[string]bool{
		"name":        pv.Name == "pvc-"+uid,
		"annotations": cmp.Equal(pv.Annotations, wantAnnotations),
		"finalizers":  cmp.Equal(pv.Finalizers, []string{storagehelpers.PVDeletionProtectionFinalizer}),
		"labels":      pv.Labels == nil,
		"capacity":    capacity.String() == "5632Mi",
		"claim": *pv.Spec.ClaimRef == corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: "ns",
			Name: "data", UID: uid, ResourceVersion: "7"},
		"class":      pv.Spec.StorageClassName == "fast",
		"policy":     pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete,
		"options":    cmp.Equal(pv.Spec.MountOptions, []string{"noatime"}),
		"modes":      cmp.Equal(pv.Spec.AccessModes, claim.Spec.AccessModes),
		"affinity":   len(pv.Spec.NodeAffinity.Required.NodeSelectorTerms) == 1,
		"source":     source.Driver == "drv.example.com" && source.VolumeHandle == "vol-1" && source.ReadOnly,
		"attributes": cmp.Equal(source.VolumeAttributes, map[string]string{identityAttribute: "me", "a": "b"}),
		"secrets": source.ControllerPublishSecretRef == secret && source.NodeStageSecretRef == secret &&
			source.NodePublishSecretRef == secret &&
			source.ControllerExpandSecretRef == secret && source.NodeExpandSecretRef == secret,
	} {
		if !ok {
			t.Errorf("%s: %+v", name, pv)
		}
	}

	o.plan.Secrets, o.plan.ReclaimPolicy = volumerules.Secrets{}, ptr.To(corev1.PersistentVolumeReclaimRetain)
	pv = d.volumeOf(o, &csi.Volume{VolumeId: "vol-1"})
	capacity = pv.Spec.Capacity[corev1.ResourceStorage]
	empty, isThere := pv.Annotations[volumerules.AnnDeletionSecretName]
	if pv.Finalizers != nil || capacity.Value() != 1_500_000_000 || empty != "" || !isThere || len(pv.Annotations) != 3 ||
		pv.Spec.NodeAffinity != nil {
		t.Errorf("retained, without secrets, topology and capacity: %+v", pv)
	}
}

func TestCheckVolume(t *testing.T) {
	source := &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{
		SnapshotId: "s",
	}}}
	for name, tt := range map[string]struct {
		source *csi.VolumeContentSource // of the request
		volume *csi.Volume
		want   error
	}{
		"none":               {nil, nil, errNoVolume},
		"no ID":              {nil, &csi.Volume{CapacityBytes: 10}, errNoVolume},
		"no ID, no content":  {source, &csi.Volume{CapacityBytes: 10}, errNoVolume}, // what has no ID cannot be deleted
		"ID of two lines":    {nil, &csi.Volume{VolumeId: "v\nw", CapacityBytes: 10}, errUnusable},
		"long ID":            {nil, &csi.Volume{VolumeId: strings.Repeat("v", 2000), CapacityBytes: 10}, errUnusable},
		"too small":          {nil, &csi.Volume{VolumeId: "v", CapacityBytes: 9}, errUnusable},
		"negative size":      {nil, &csi.Volume{VolumeId: "v", CapacityBytes: -1}, errUnusable},
		"as asked":           {nil, &csi.Volume{VolumeId: "v", CapacityBytes: 10}, nil},
		"size unknown":       {nil, &csi.Volume{VolumeId: "v"}, nil},
		"larger":             {nil, &csi.Volume{VolumeId: "v", CapacityBytes: 11}, nil},
		"content ignored":    {source, &csi.Volume{VolumeId: "v", CapacityBytes: 10}, errUnusable},
		"content confirmed":  {source, &csi.Volume{VolumeId: "v", CapacityBytes: 10, ContentSource: source}, nil},
		"content, too small": {source, &csi.Volume{VolumeId: "v", CapacityBytes: 9, ContentSource: source}, errUnusable},
		"content not asked":  {nil, &csi.Volume{VolumeId: "v", CapacityBytes: 10, ContentSource: source}, nil},
	} {
		request := &csi.CreateVolumeRequest{CapacityRange: &csi.CapacityRange{RequiredBytes: 10}, VolumeContentSource: tt.source}
		if err := checkVolume(operation{request: request}, tt.volume); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	request := &csi.CreateVolumeRequest{CapacityRange: &csi.CapacityRange{RequiredBytes: 10}}
	for size, want := range map[int64]error{0: errUnusable, 10: nil, 19: nil, 20: errUnusable, 21: errUnusable} {
		o := operation{request: request, sourceBytes: 20}
		if err := checkVolume(o, &csi.Volume{VolumeId: "v", CapacityBytes: size}); !errors.Is(err, want) {
			t.Errorf("%d bytes of a source with 20: %v", size, err)
		}
	}
}

func TestDeletionSecret(t *testing.T) {
	class := testClass(parameters(map[string]string{volumerules.ParameterPrefix + "provisioner-secret-name": "${pvc.name}",
		volumerules.ParameterPrefix + "provisioner-secret-namespace": "n"}))
	broken := testClass(parameters(map[string]string{volumerules.ParameterPrefix + "provisioner-secret-name": "${pvc.annotations['x']}",
		volumerules.ParameterPrefix + "provisioner-secret-namespace": "n"}))
	claim := &corev1.ObjectReference{Namespace: "ns", Name: "data"}
	tests := map[string]struct {
		annotations map[string]string
		class       *storagev1.StorageClass
		claim       *corev1.ObjectReference
		want        string
		err         bool
	}{
		"annotations win over the class": {map[string]string{volumerules.AnnDeletionSecretName: "s",
			volumerules.AnnDeletionSecretNamespace: "m"}, class, claim, "m/s", false},
		"empty annotations mean none": {map[string]string{volumerules.AnnDeletionSecretName: "",
			volumerules.AnnDeletionSecretNamespace: ""}, class, claim, "", false},
		"one annotation is empty": {map[string]string{volumerules.AnnDeletionSecretName: "s",
			volumerules.AnnDeletionSecretNamespace: ""}, class, claim, "", true},
		"one annotation is missing":         {map[string]string{volumerules.AnnDeletionSecretName: "s"}, class, claim, "n/data", false},
		"no annotations":                    {nil, class, claim, "n/data", false},
		"no annotations, no class":          {nil, nil, claim, "", false},
		"no annotations, no claim":          {nil, class, nil, "", false},
		"a template that cannot be made up": {nil, broken, claim, "", true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			pv := &corev1.PersistentVolume{}
			pv.Annotations, pv.Spec.ClaimRef = tt.annotations, tt.claim
			ref, err := testDriver(nil).deletionSecret(pv, tt.class)
			got := ""
			if ref != nil {
				got = ref.Namespace + "/" + ref.Name
			}
			if got != tt.want || (err != nil) != tt.err {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

func TestLeaseName(t *testing.T) {
	for driver, want := range map[string]string{"ebs.csi.aws.com": "ebs-csi-aws-com", "foo.": "foo-x", "Foo": "foo"} {
		if got := LeaseName(driver); got != want {
			t.Errorf("%s: %s", driver, got)
		}
	}
}
