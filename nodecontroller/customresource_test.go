// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestParseResource(t *testing.T) {
	logicalVolumes := CustomResource{
		Resource:  schema.GroupVersionResource{Group: "topolvm.io", Version: "v1", Resource: "logicalvolumes"},
		NodeField: []string{"spec", "nodeName"}, HandleField: []string{"status", "volumeID"},
		Finalizer: "topolvm.io/logicalvolume",
		MarkKey:   "topolvm.io/pendingdeletion", MarkValue: "true", When: WhenNodeTerminating,
	}
	least := CustomResource{Resource: logicalVolumes.Resource, NodeField: []string{"nodeName"}, HandleField: []string{"id"},
		When: WhenNodeGone}
	spaced := least
	spaced.Finalizer, spaced.MarkKey, spaced.MarkValue = "x.y/z", "x.y/a", "b=c"
	for text, want := range map[string]CustomResource{
		"resource=logicalvolumes.v1.topolvm.io,node-field=spec.nodeName,handle-field=status.volumeID," +
			"finalizer=topolvm.io/logicalvolume," +
			"mark=topolvm.io/pendingdeletion=true,when=node-terminating": logicalVolumes,
		"node-field=nodeName,handle-field=id,resource=logicalvolumes.v1.topolvm.io":                                    least,
		"node-field=nodeName, handle-field=id, resource=logicalvolumes.v1.topolvm.io, finalizer=x.y/z, mark=x.y/a=b=c": spaced,
	} {
		if got, err := ParseResource(text); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %+v, %v", text, got, err)
		}
	}
	const valid = "resource=a.v1.x.y,node-field=spec.node"
	for text, want := range map[string][]string{
		"":                                  {`item ""`, "resource: is missing", "node-field: is missing", "handle-field: is missing"},
		"resource=pods,node-field=a":        {"resource: must be plural.version.group"},
		"resource=pods.v1.,node-field=a":    {"resource: must be plural.version.group"},
		"resource=jobs.v1.batch":            {"resource: must be plural.version.group", "node-field: is missing"},
		"resource=A.v1.x.y,node-field=a":    {"resource: must be plural.version.group"},
		"resource=a.v1.x.y,node-field=a..b": {"node-field"},
		"resource=a.v1.x.y,node-field=.a":   {"node-field"},
		valid + ",finalizer=x":              {"finalizer: must have a prefix"},
		valid + ",mark=x.y/z=1":             {"mark: is set only when"},
		valid + ",finalizer=x.y/f,mark=x.y": {"mark: must be annotation=value"},
		valid + ",when=now":                 {`when: must be node-terminating or node-gone, got "now"`},
		valid + ",node-field=b":             {"node-field: must not be repeated"},
		valid + ",nodefield=b,when=x":       {"nodefield: unknown key", "when: must be"},
		valid + ",finalizer":                {`item "finalizer": must be key=value`},
		valid + ",finalizer=":               {`item "finalizer=": must be key=value`},
	} {
		_, err := ParseResource(text)
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%q: got %v, want an error with %q", text, err, w)
			}
		}
	}
}
