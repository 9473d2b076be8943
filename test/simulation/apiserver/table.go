// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"cmp"
	"encoding/json"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/utils/ptr"
)

// columns has the columns between name and age that kubectl get prints, by kind, and their values.
var columns = map[string]struct {
	names  []string
	values func(runtime.Object) []any
}{
	"PersistentVolumeClaim": {[]string{"Status", "Volume", "Capacity", "StorageClass"}, on(func(o *corev1.PersistentVolumeClaim) []any {
		return []any{o.Status.Phase, o.Spec.VolumeName, size(o.Status.Capacity), ptr.Deref(o.Spec.StorageClassName, "")}
	})},
	"PersistentVolume": {[]string{"Capacity", "Reclaim Policy", "Status", "Claim"}, on(func(o *corev1.PersistentVolume) []any {
		claim := ""
		if o.Spec.ClaimRef != nil {
			claim = o.Spec.ClaimRef.Namespace + "/" + o.Spec.ClaimRef.Name
		}
		return []any{size(o.Spec.Capacity), o.Spec.PersistentVolumeReclaimPolicy, o.Status.Phase, claim}
	})},
	"VolumeAttachment": {[]string{"PV", "Node", "Attached"}, on(func(o *storagev1.VolumeAttachment) []any {
		return []any{ptr.Deref(o.Spec.Source.PersistentVolumeName, ""), o.Spec.NodeName, strconv.FormatBool(o.Status.Attached)}
	})},
	"Pod": {[]string{"Status", "Node"}, on(func(o *corev1.Pod) []any { return []any{o.Status.Phase, o.Spec.NodeName} })},
}

// size returns the capacity of a volume, "" for none.
func size(capacity corev1.ResourceList) string {
	storage, ok := capacity[corev1.ResourceStorage]
	if !ok {
		return ""
	}
	return storage.String()
}

// table returns obj, an object or a list, as kubectl prints it.
func (r *resource) table(obj runtime.Object, now time.Time) *metav1.Table {
	kind := columns[r.kind]
	t := &metav1.Table{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "Table"}}
	add := func(name string) {
		t.ColumnDefinitions = append(t.ColumnDefinitions, metav1.TableColumnDefinition{Name: name, Type: "string", Format: "name"})
	}
	add("Name")
	for _, name := range kind.names {
		add(name)
	}
	add("Age")
	row := func(obj runtime.Object) error {
		m := accessor(obj)
		cells := []any{m.GetName()}
		if kind.values != nil {
			cells = append(cells, kind.values(obj)...)
		}
		cells = append(cells, duration.HumanDuration(now.Sub(m.GetCreationTimestamp().Time)))
		t.Rows = append(t.Rows, metav1.TableRow{Cells: cells, Object: runtime.RawExtension{Object: partial(obj)}})
		return nil
	}
	if list, err := meta.ListAccessor(obj); err == nil {
		t.ListMeta = metav1.ListMeta{ResourceVersion: list.GetResourceVersion(), Continue: list.GetContinue()}
		_ = meta.EachListItem(obj, row) // the function returns no error
	} else {
		_ = row(obj)
	}
	return t
}

// shortNames has those of resources that users type.
var shortNames = map[string][]string{
	"persistentvolumeclaims": {"pvc"}, "persistentvolumes": {"pv"}, "pods": {"po"}, "nodes": {"no"}, "events": {"ev"}, "namespaces": {"ns"},
	"storageclasses": {"sc"}, "configmaps": {"cm"}, "volumesnapshots": {"vs"}, "volumesnapshotcontents": {"vsc"},
}

// root returns the response for a path that lists versions and groups, or nil.
func (s *Server) root(path string) any {
	switch path {
	case "version":
		return map[string]string{"major": "1", "minor": "36", "gitVersion": "v1.36.0-simulated"}
	case "api":
		return metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions", APIVersion: "v1"}, Versions: []string{"v1"}}
	case "apis":
	default:
		return nil
	}
	list := metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}}
	for _, r := range s.sortedResources() {
		gv := metav1.GroupVersionForDiscovery{GroupVersion: r.gvr.GroupVersion().String(), Version: r.gvr.Version}
		last := len(list.Groups) - 1
		switch {
		case r.gvr.Group == "":
		case last < 0 || list.Groups[last].Name != r.gvr.Group:
			list.Groups = append(list.Groups, metav1.APIGroup{
				Name: r.gvr.Group, Versions: []metav1.GroupVersionForDiscovery{gv}, PreferredVersion: gv,
			})
		case list.Groups[last].Versions[len(list.Groups[last].Versions)-1] != gv:
			list.Groups[last].Versions = append(list.Groups[last].Versions, gv)
		}
	}
	return list
}

// discovered returns the entry of a resource, or of its subresource.
func (r *resource) discovered(subresource string) metav1.APIResource {
	verbs := metav1.Verbs{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"}
	if subresource != "" {
		verbs = metav1.Verbs{"get", "patch", "update"}
	}
	return metav1.APIResource{
		Name: strings.TrimSuffix(r.gvr.Resource+"/"+subresource, "/"), SingularName: strings.ToLower(r.kind), Kind: r.kind,
		Namespaced: r.namespaced, Verbs: verbs, ShortNames: shortNames[cmp.Or(subresource, r.gvr.Resource)],
	}
}

// mustEncode returns the JSON form of a value of this package, which can be encoded.
func mustEncode(value any) []byte {
	body, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return body
}
