// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

// restricted is a user without permissions.
const restricted = "restricted-user"

// step is a request of testdata/requests.txt: a comment with the name, a line with method, path and options,
// and the body in YAML. COMPACT removes the history up to a version. $NAME.uid, $NAME.rv and
// $NAME.continue are those of an earlier response with keep=NAME.
type step struct {
	name, method, path, body string
	options                  map[string]string
}

// contentTypes maps the values of the option patch.
var contentTypes = map[string]string{
	"":          "application/json",
	"json":      "application/json-patch+json",
	"merge":     "application/merge-patch+json",
	"strategic": "application/strategic-merge-patch+json",
}

// steps reads the steps of a file.
func steps(t *testing.T, path string) []step {
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var all []step
	for block := range strings.SplitSeq(string(text), "\n\n") {
		var s step
		for strings.HasPrefix(block, "#") {
			var comment string
			comment, block, _ = strings.Cut(block, "\n")
			s.name = strings.TrimSpace(strings.TrimLeft(comment, "#"))
		}
		request, body, _ := strings.Cut(strings.TrimSpace(block), "\n")
		words := strings.Fields(request)
		if len(words) == 0 {
			continue
		}
		s.method, s.path, s.body, s.options = words[0], words[1], body, map[string]string{}
		for _, option := range words[2:] {
			k, v, _ := strings.Cut(option, "=")
			s.options[k] = v
		}
		if s.name == "" || len(words) < 2 {
			t.Fatalf("%s: a step without a name: %s", path, block)
		}
		all = append(all, s)
	}
	return all
}

// server is a side of the comparison.
type server struct {
	t         *testing.T
	host      string
	transport http.RoundTripper
	compact   func(version string)
	kept      map[string]metav1.PartialObjectMetadataList // metadata of the object or the list
}

func newServer(t *testing.T, cfg *rest.Config) *server {
	transport, err := rest.TransportFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &server{t: t, host: cfg.Host, transport: transport, kept: map[string]metav1.PartialObjectMetadataList{}}
}

var variable = regexp.MustCompile(`\$([a-z0-9-]+)\.(uid|rv|continue)`)

// expand replaces variables.
func (s *server) expand(text string) string {
	return variable.ReplaceAllStringFunc(text, func(v string) string {
		m := variable.FindStringSubmatch(v)
		kept, ok := s.kept[m[1]]
		switch {
		case !ok:
			s.t.Fatalf("%s is not known: the step with keep=%s comes first", v, m[1])
		case m[2] == "continue":
			return kept.Continue
		case m[2] == "rv":
			return kept.ResourceVersion
		}
		return string(kept.Items[0].UID)
	})
}

// etcd finds the address of etcd in the log of the real API server.
var etcd = regexp.MustCompile(`--etcd-servers="\[(http://[^\]]+)\]"`)

// compactReal removes the history of the real API server.
func compactReal(t *testing.T, controlPlane *kubetest.ControlPlane, version string) {
	log, err := os.ReadFile(filepath.Join(controlPlane.Dir(), "apiserver.log"))
	if err != nil {
		t.Fatal(err)
	}
	address := etcd.FindSubmatch(log)
	if address == nil {
		t.Fatal("the log of the API server does not name etcd")
	}
	body := strings.NewReader(fmt.Sprintf(`{"revision":%q,"physical":true}`, version))
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, string(address[1])+"/v3/kv/compaction", body)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		t.Fatalf("compaction of etcd: %s", response.Status)
	}
}

// do sends the request of a step and returns the comparable form of the response.
func (s *server) do(step step) []any {
	if step.method == "COMPACT" {
		s.compact(s.expand(step.path))
		return nil
	}
	request, err := http.NewRequestWithContext(s.t.Context(), step.method, s.host+s.expand(step.path), nil)
	if err != nil {
		s.t.Fatal(err)
	}
	_, proto := step.options["proto"]
	if body := s.expand(step.body); body != "" {
		data, err := yaml.YAMLToJSON([]byte(body))
		if err != nil {
			s.t.Fatalf("%s: %v", step.name, err)
		}
		request.Header.Set("Content-Type", contentTypes[step.options["patch"]])
		if proto && step.method != http.MethodPatch {
			data = toProtobuf(s.t, data)
			request.Header.Set("Content-Type", runtime.ContentTypeProtobuf)
		}
		request.Body, request.ContentLength = io.NopCloser(bytes.NewReader(data)), int64(len(data))
	}
	accept := runtime.ContentTypeJSON
	if proto {
		accept = runtime.ContentTypeProtobuf
	}
	if kind := step.options["as"]; kind != "" {
		accept += ";as=" + kind + ";g=meta.k8s.io;v=v1"
	}
	request.Header.Set("Accept", accept)
	if user := step.options["user"]; user != "" {
		request.Header.Set("Impersonate-User", user)
		request.Header.Set("Impersonate-Group", "system:authenticated")
	}
	response, err := s.transport.RoundTrip(request)
	if err != nil {
		s.t.Fatalf("%s: %v", step.name, err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatalf("%s: %v", step.name, err)
	}
	if response.Header.Get("Content-Type") == runtime.ContentTypeProtobuf {
		data = fromProtobuf(s.t, data)
	}
	return append([]any{response.StatusCode, response.Header.Get("Content-Type")}, s.comparable(step, data)...)
}

// comparable returns the JSON documents in data without volatile values.
func (s *server) comparable(step step, data []byte) []any {
	var documents []any
	for decoder := json.NewDecoder(bytes.NewReader(data)); ; {
		var document map[string]any
		err := decoder.Decode(&document)
		if err == io.EOF {
			return documents
		}
		if err != nil {
			return append(documents, string(data)) // a page for humans
		}
		if keep := step.options["keep"]; keep != "" {
			var m struct {
				Metadata struct {
					metav1.ObjectMeta
					Continue string
				}
			}
			if err := json.Unmarshal(data, &m); err != nil {
				s.t.Fatal(err)
			}
			list := metav1.PartialObjectMetadataList{Items: []metav1.PartialObjectMetadata{{ObjectMeta: m.Metadata.ObjectMeta}}}
			list.ResourceVersion, list.Continue = m.Metadata.ResourceVersion, m.Metadata.Continue
			s.kept[keep] = list
		}
		if document["type"] == "BOOKMARK" && !strings.Contains(string(data), metav1.InitialEventsAnnotationKey) {
			continue // those depend on the time
		}
		documents = append(documents, stable("", document))
	}
}

var (
	timestamp = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z`)
	uid       = regexp.MustCompile(`[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}`)
	// managedFields is in a message as part of a quoted object.
	managedFields = regexp.MustCompile(`,\\"managedFields\\":\[.*?\}\]`)
	number        = regexp.MustCompile(`\d{2,}`)
)

// stable returns value without what differs between two runs on one server.
func stable(name string, value any) any {
	switch value := value.(type) {
	case map[string]any:
		out := map[string]any{}
		if base, ok := value["generateName"].(string); ok && strings.HasPrefix(fmt.Sprint(value["name"]), base) {
			if labels, ok := value["labels"].(map[string]any); ok && labels["kubernetes.io/metadata.name"] == value["name"] {
				labels["kubernetes.io/metadata.name"] = base
			}
			value["name"] = fmt.Sprintf("%s(%d)", base, len(fmt.Sprint(value["name"]))-len(base))
		}
		// API servers before Kubernetes 1.37 have no status of CSINodes.
		if status, ok := value["status"].(map[string]any); ok && value["kind"] == "CSINode" && len(status) == 0 {
			delete(value, "status")
		}
		for k, v := range value {
			if k != "managedFields" {
				out[k] = stable(k, v)
			}
		}
		return out
	case []any:
		out := make([]any, len(value))
		for i, v := range value {
			out[i] = stable("", v)
		}
		return out
	case string:
		if name == "resourceVersion" || name == "continue" {
			return value != ""
		}
		value = uid.ReplaceAllString(timestamp.ReplaceAllString(value, "TIME"), "UID")
		if name == "message" {
			value = managedFields.ReplaceAllString(value, "")
			value = number.ReplaceAllString(value, "N")
		}
		return value
	}
	return value
}

var codecs = serializer.NewCodecFactory(scheme.Scheme)

func toProtobuf(t *testing.T, data []byte) []byte {
	obj, gvk, err := codecs.UniversalDeserializer().Decode(data, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	info, _ := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	out, err := runtime.Encode(codecs.EncoderForVersion(info.Serializer, gvk.GroupVersion()), obj)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func fromProtobuf(t *testing.T, data []byte) []byte {
	var unknown runtime.Unknown
	if err := unknown.Unmarshal(data[4:]); err != nil {
		t.Fatal(err)
	}
	gvk := schema.FromAPIVersionAndKind(unknown.APIVersion, unknown.Kind)
	var obj runtime.Object
	switch gvk.Kind {
	case "PartialObjectMetadata":
		obj = &metav1.PartialObjectMetadata{}
	case "PartialObjectMetadataList":
		obj = &metav1.PartialObjectMetadataList{}
	case "Status":
		obj = &metav1.Status{}
	default:
		var err error
		if obj, err = scheme.Scheme.New(gvk); err != nil {
			t.Fatal(err)
		}
	}
	if err := obj.(interface{ Unmarshal([]byte) error }).Unmarshal(unknown.Raw); err != nil {
		t.Fatal(err)
	}
	obj.GetObjectKind().SetGroupVersionKind(gvk)
	out, err := json.Marshal(obj)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestSameResponses sends the same requests to the real API server and to the one in memory.
func TestSameResponses(t *testing.T) {
	controlPlane := kubetest.Get(t, kubetest.Real())
	kubetest.InstallCRDs(t, controlPlane)
	memory := apiserver.New(apiserver.Hooks{Allow: func(r apiserver.Request) bool { return r.User != restricted }})
	servers := []*server{newServer(t, controlPlane.Config()), newServer(t, memory.Config("suite"))}
	servers[0].compact = func(version string) { compactReal(t, controlPlane, version) }
	servers[1].compact = func(version string) {
		n, err := strconv.ParseUint(version, 10, 64)
		if err != nil {
			t.Error(err)
		}
		memory.Compact(n)
	}
	all := steps(t, "testdata/requests.txt")
	different := 0
	for _, step := range all {
		var responses [2][]any
		var wg sync.WaitGroup
		for i, server := range servers {
			wg.Go(func() {
				responses[i] = server.do(step)
				// The admission of the real server reads classes from a cache, which may not have the last change.
				limit := time.Now().Add(10 * time.Second)
				for step.name == "expand a claim" && responses[i][0] == 403 && time.Now().Before(limit) {
					responses[i] = server.do(step)
				}
			})
		}
		wg.Wait()
		if diff := cmp.Diff(responses[0], responses[1]); diff != "" {
			different++
			t.Errorf("%s\n%s %s (-real +memory):\n%s", step.name, step.method, step.path, diff)
		}
	}
	t.Logf("%d requests, %d of them with different responses", len(all), different)
	if len(all) < 293 {
		t.Errorf("%d requests: the file has fewer than it had", len(all))
	}
}
