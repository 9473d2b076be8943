// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"encoding/json"
	"testing"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
)

// apply makes patch of raw with the library of the API server; without a patch, raw.
func apply(t testing.TB, raw, patch []byte) []byte {
	t.Helper()
	if patch == nil {
		return raw
	}
	p, err := jsonpatch.DecodePatch(patch)
	if err != nil {
		t.Fatalf("%s: %v", patch, err)
	}
	out, err := p.Apply(raw)
	if err != nil {
		t.Fatalf("%s does not apply to %s: %v", patch, raw, err)
	}
	return out
}

// encoded returns ops in JSON, nil for none.
func encoded(t *testing.T, ops []operation) []byte {
	t.Helper()
	if len(ops) == 0 {
		return nil
	}
	data, err := json.Marshal(ops)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestFinalizerPatch(t *testing.T) {
	for name, c := range map[string]struct{ claim, want string }{
		"no metadata": {`{}`,
			`[{"op":"add","path":"/metadata","value":{}},{"op":"add","path":"/metadata/finalizers","value":["x/y"]}]`},
		"no finalizers": {`{"metadata":{"name":"a"}}`, `[{"op":"add","path":"/metadata/finalizers","value":["x/y"]}]`},
		"null":          {`{"metadata":{"finalizers":null}}`, `[{"op":"add","path":"/metadata/finalizers","value":["x/y"]}]`},
		"empty list":    {`{"metadata":{"finalizers":[]}}`, `[{"op":"add","path":"/metadata/finalizers/-","value":"x/y"}]`},
		"another one":   {`{"metadata":{"finalizers":["a/b"]}}`, `[{"op":"add","path":"/metadata/finalizers/-","value":"x/y"}]`},
		"there":         {`{"metadata":{"finalizers":["x/y","a/b"]}}`, ``},
		"key in another case": {`{"Metadata":{"finalizers":["x/y"]},"metadata":{}}`,
			`[{"op":"add","path":"/metadata/finalizers","value":["x/y"]}]`},
		"unknown fields there": {`{"metadata":{"new":1}}`, `[{"op":"add","path":"/metadata/finalizers","value":["x/y"]}]`},
	} {
		t.Run(name, func(t *testing.T) {
			claim := &rawClaim{}
			if err := decode([]byte(c.claim), claim); err != nil {
				t.Fatal(err)
			}
			got := encoded(t, finalizerPatch(claim.Metadata, "x/y"))
			if string(got) != c.want {
				t.Fatalf("%s", got)
			}
			apply(t, []byte(c.claim), got)
		})
	}
}

func TestAnnotationAndResourceOperations(t *testing.T) {
	for name, c := range map[string]struct{ pod, want string }{
		"nothing there": {`{"metadata":{},"spec":{"containers":[{}]}}`,
			`[{"op":"add","path":"/metadata/annotations","value":{}},{"op":"add","path":"/metadata/annotations/c~1a","value":"1"},{"op":"add","path":"/metadata/annotations/c~1~0b","value":"2"},` +
				`{"op":"add","path":"/spec/containers/0/resources","value":{}},{"op":"add","path":"/spec/containers/0/resources/limits","value":{}},{"op":"add","path":"/spec/containers/0/resources/limits/x~1c","value":"1"},` +
				`{"op":"add","path":"/spec/containers/0/resources/requests","value":{}},{"op":"add","path":"/spec/containers/0/resources/requests/x~1c","value":"1"}]`},
		"null everywhere": {`{"metadata":{"annotations":null},"spec":{"containers":[{"resources":{"limits":null,"requests":null}}]}}`,
			`[{"op":"add","path":"/metadata/annotations","value":{}},{"op":"add","path":"/metadata/annotations/c~1a","value":"1"},{"op":"add","path":"/metadata/annotations/c~1~0b","value":"2"},` +
				`{"op":"add","path":"/spec/containers/0/resources/limits","value":{}},{"op":"add","path":"/spec/containers/0/resources/limits/x~1c","value":"1"},` +
				`{"op":"add","path":"/spec/containers/0/resources/requests","value":{}},{"op":"add","path":"/spec/containers/0/resources/requests/x~1c","value":"1"}]`},
		"all there": {
			`{"metadata":{"annotations":{"c/a":"1","c/~b":"2","k":"v"}},"spec":{"containers":[{"resources":{"limits":{"x/c":"1"},"requests":{"x/c":"1","cpu":"2"}}}]}}`, ``},
		"others there": {
			`{"metadata":{"annotations":{"c/a":"9","other":"1","c/~b":"2"}},"spec":{"containers":[{"resources":{"limits":{"x/c":"3"},"requests":{"x/c":1}}}]}}`,
			`[{"op":"add","path":"/metadata/annotations/c~1a","value":"1"},` +
				`{"op":"add","path":"/spec/containers/0/resources/limits/x~1c","value":"1"},{"op":"add","path":"/spec/containers/0/resources/requests/x~1c","value":"1"}]`},
	} {
		t.Run(name, func(t *testing.T) {
			pod := &rawPod{}
			if err := decode([]byte(c.pod), pod); err != nil {
				t.Fatal(err)
			}
			ops := annotationOps(pod.Metadata, map[string]string{"c/a": "1", "c/~b": "2"})
			got := encoded(t, append(ops, resourceOps("/spec/containers/0", pod.Spec.Containers[0].Resources, "x/c")...))
			if string(got) != c.want {
				t.Fatalf("got  %s\nwant %s", got, c.want)
			}
			if out := apply(t, []byte(c.pod), got); !json.Valid(out) {
				t.Errorf("%s", out)
			}
		})
	}
}

func TestDecodeRefusesWhatHasTwoMeanings(t *testing.T) {
	for _, raw := range []string{
		`{"metadata":{"annotations":{"a":"1","a":"2"}}}`, `{"metadata":{"annotations":{}},"metadata":{}}`,
		`{"spec":{"containers":[{"resources":{"limits":{"a":"1"},"limits":{}}}]}}`,
	} {
		if err := decode([]byte(raw), &rawPod{}); err == nil {
			t.Errorf("%s was taken", raw)
		}
	}
}
