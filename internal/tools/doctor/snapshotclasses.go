// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// snapshotClasses are the kinds of classes that name a secret of the snapshotter.
var snapshotClasses = []struct {
	kind     string
	resource schema.GroupVersionResource
	older    string // version that is used if that of resource is not served; "": none
	purpose  volumerules.Purpose
}{
	{"VolumeSnapshotClass", apiread.SnapshotClasses, "", "snapshotter"},
	{"VolumeGroupSnapshotClass", schema.GroupVersionResource{
		Group: "groupsnapshot.storage.k8s.io", Version: "v1", Resource: "volumegroupsnapshotclasses"}, "v1beta2", "group-snapshotter"},
}

// checkSnapshotClasses checks the secrets of the snapshot classes of the driver, if the snapshotter runs.
func (e *examination) checkSnapshotClasses(ctx context.Context) {
	if !e.plan.runs("snapshotter") {
		return
	}
	for _, s := range snapshotClasses {
		if !slices.ContainsFunc(e.plan.APIs, func(a API) bool { return a.GroupVersion == s.resource.GroupVersion().String() }) {
			continue
		}
		query := apiread.Query{Topic: s.resource.Resource, What: s.kind + "es"}
		classes := apiread.List[*unstructured.Unstructured](ctx, e.reader, query, e.Dynamic.Resource(s.resource).List)
		if classes.Missing && s.older != "" {
			query.What += " of " + s.older
			older := s.resource.GroupResource().WithVersion(s.older)
			classes = apiread.List[*unstructured.Unstructured](ctx, e.reader, query, e.Dynamic.Resource(older).List)
		}
		for _, c := range classes.Value { // checkAPIs reports a missing CRD
			driver, _, _ := unstructured.NestedString(c.Object, "driver")
			parameters, _, _ := unstructured.NestedStringMap(c.Object, "parameters")
			prefix := volumerules.ParameterPrefix + string(s.purpose) + "-secret-"
			secret := volumerules.Secret{Purpose: s.purpose, Namespace: parameters[prefix+"namespace"], Name: parameters[prefix+"name"]}
			switch {
			case driver != e.driver.Name || secret.Name == "" && secret.Namespace == "":
			case secret.Name == "" || secret.Namespace == "":
				e.add(s.kind+" "+c.GetName(), finding.Failing, "correct the parameters; no snapshot of this class can be created",
					"class parameters %q and %q: set both or none", prefix+"name", prefix+"namespace")
			default:
				e.checkSecretAccess(ctx, secret, "snapshotter")
				e.checkSecretExists(ctx, s.kind+" "+c.GetName(), secret)
			}
		}
	}
}
