// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package looptest

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// recorder records the requests of a client.
type recorder struct {
	t    *Transcript
	next http.RoundTripper
}

// RoundTrip sends r and records it, unless it is for an object of a test in another namespace.
func (rec recorder) RoundTrip(r *http.Request) (*http.Response, error) {
	if strings.Contains(r.URL.Path, "/namespaces/") && !strings.Contains(r.URL.Path, "/namespaces/"+rec.t.f.Namespace+"/") {
		return rec.next.RoundTrip(r)
	}
	e := entry{began: time.Now()}
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
	}
	response, err := rec.next.RoundTrip(r)
	verb := map[string]string{
		http.MethodGet: "get", http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete",
	}[r.Method]
	object := objectOf(r.URL.Path)
	e.line = "api  " + verb + " " + object
	e.fields = fieldsOf(r, body)
	switch {
	case r.Context().Err() != nil:
		return response, err // whether it reached the server, is a race
	case err != nil:
		e.result = "no response"
	case response.StatusCode >= http.StatusBadRequest:
		e.result = http.StatusText(response.StatusCode)
	case r.Method == http.MethodPost:
		e.line += "/" + createdName(response)
	}
	rec.t.add(e)
	return response, err
}

// createdName returns the name of the object in response, whose body stays readable.
func createdName(response *http.Response) string {
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err.Error()
	}
	response.Body = io.NopCloser(bytes.NewReader(body))
	var object metav1.PartialObjectMetadata
	if err := json.Unmarshal(body, &object); err != nil {
		return err.Error()
	}
	return object.Name
}

// objectOf returns RESOURCE/NAME or RESOURCE/NAME/SUBRESOURCE of a path.
func objectOf(path string) string {
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	if parts[0] == "api" {
		parts = parts[2:]
	} else {
		parts = parts[3:]
	}
	if len(parts) > 2 && parts[0] == "namespaces" {
		parts = parts[2:]
	}
	return strings.Join(parts, "/")
}

// fieldsOf returns what a request writes.
func fieldsOf(r *http.Request, body []byte) []string {
	if len(body) == 0 {
		return nil
	}
	if r.Header.Get("Content-Type") == "application/json-patch+json" {
		return patched(body)
	}
	var fields map[string]any
	if json.Unmarshal(body, &fields) != nil {
		return []string{"(body is not JSON)"}
	}
	delete(fields, "kind")
	delete(fields, "apiVersion")
	return flatten("", fields)
}

// operation is an operation of a JSON patch.
type operation struct {
	Op, Path string
	Value    any
}

// patched returns the changes of a JSON patch. Its tests give the values before.
func patched(body []byte) []string {
	var operations []operation
	if err := json.Unmarshal(body, &operations); err != nil {
		return []string{err.Error()}
	}
	before := map[string]any{}
	var fields []string
	for _, o := range operations {
		name := pointerName(o.Path)
		old, isList := before[o.Path].([]any)
		list, setsList := o.Value.([]any)
		switch {
		case o.Op == "test":
			before[o.Path] = o.Value
		case isList || setsList:
			for _, v := range list {
				if !slices.Contains(old, v) {
					fields = append(fields, fmt.Sprintf("%s+=%v", name, v))
				}
			}
			for _, v := range old {
				if !slices.Contains(list, v) {
					fields = append(fields, fmt.Sprintf("%s-=%v", name, v))
				}
			}
		case o.Op == "remove":
			fields = append(fields, name+"=null")
		default:
			fields = append(fields, flatten(name, o.Value)...)
		}
	}
	return fields
}

// pointerName converts a JSON pointer to the name of a field.
func pointerName(pointer string) string {
	name := ""
	for _, part := range strings.Split(pointer[1:], "/") {
		name = join(name, strings.NewReplacer("~1", "/", "~0", "~").Replace(part))
	}
	return name
}

// join returns the name of a field of parent. Names of metadata, spec and status are short.
func join(parent, key string) string {
	switch {
	case parent == "", parent == "metadata", parent == "spec", parent == "status":
		return key
	case strings.ContainsAny(key, "./"):
		return parent + "[" + key + "]"
	}
	return parent + "." + key
}

// flatten returns value as lines NAME=VALUE, sorted. It leaves out the UID and the
// resourceVersion, which are preconditions.
func flatten(name string, value any) []string {
	switch v := value.(type) {
	case map[string]any:
		if len(v) == 0 && name != "" {
			return []string{name + "={}"}
		}
		var fields []string
		for _, key := range slices.Sorted(maps.Keys(v)) {
			full := join(name, key)
			if full != "uid" && full != "resourceVersion" && full != "creationTimestamp" {
				fields = append(fields, flatten(full, v[key])...)
			}
		}
		return fields
	case []any:
		if slices.ContainsFunc(v, func(e any) bool { _, ok := e.(map[string]any); return ok }) {
			var fields []string
			for i, e := range v {
				fields = append(fields, flatten(fmt.Sprintf("%s[%d]", name, i), e)...)
			}
			return fields
		}
	case nil:
		return []string{name + "=null"}
	}
	if strings.HasSuffix(name, ".resourceVersion") {
		value = "VERSION"
	}
	return []string{fmt.Sprintf("%s=%v", name, value)}
}

// ofProto converts m to the form that [flatten] reads.
func ofProto(m proto.Message) (fields map[string]any) {
	if m == nil {
		return nil
	}
	if data, err := (protojson.MarshalOptions{UseProtoNames: true}).Marshal(m); err == nil {
		_ = json.Unmarshal(data, &fields) // it was valid
	}
	return fields
}

// names replaces generated values by stable ones.
type names struct {
	fixed   *strings.Replacer
	pattern *regexp.Regexp
	seen    map[string]string
	count   map[string]int
}

func newNames(f *Fixture) *names {
	return &names{
		fixed: strings.NewReplacer(
			f.Driver, "csi.example.com", strings.ReplaceAll(f.Driver, ".", "-"), "csi-example-com", f.Namespace+"-", "", f.Namespace,
			"NAMESPACE",
			"stream terminated by RST_STREAM with error code: CANCEL", "context deadline exceeded", // the server may notice first
		),
		pattern: regexp.MustCompile(`(?P<uid>\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b)` +
			`|(?P<hash>\b[0-9a-f]{64}\b)|(?P<identity>\b\d{13}-\d+-csi.example.com\b)` +
			`|(?P<time>\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z)|(?P<nanoseconds>\b1\.\d+e\+18\b)` +
			`|(?P<handle>\bvol-\d{6}\b)|(?P<object>\bcsisc-\w{5}\b)`),
		seen: map[string]string{}, count: map[string]int{},
	}
}

func (n *names) replace(text string) string {
	return n.pattern.ReplaceAllStringFunc(n.fixed.Replace(text), func(value string) string {
		if name, ok := n.seen[value]; ok {
			return name
		}
		match := n.pattern.FindStringSubmatch(value)
		for i, kind := range n.pattern.SubexpNames() {
			if kind == "" || match[i] == "" {
				continue
			}
			kind = cmp.Or(map[string]string{"handle": "vol", "object": "csisc"}[kind], strings.ToUpper(kind))
			if kind == "TIME" || kind == "NANOSECONDS" || kind == "HASH" || kind == "IDENTITY" {
				return kind
			}
			n.count[kind]++
			n.seen[value] = fmt.Sprintf("%s-%d", kind, n.count[kind])
		}
		return n.seen[value]
	})
}
