// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"encoding/json"
	"fmt"
	"mime"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	kjson "sigs.k8s.io/json"
)

const (
	jsonType     = runtime.ContentTypeJSON
	protobufType = runtime.ContentTypeProtobuf
)

// serializers has the encodings of responses, by media type.
var serializers = func() map[string]runtime.SerializerInfo {
	all := map[string]runtime.SerializerInfo{}
	for _, info := range serializer.NewCodecFactory(scheme.Scheme).SupportedMediaTypes() {
		all[info.MediaType] = info
	}
	return all
}()

// media is the encoding of a response.
type media struct {
	mime    string // json or protobuf
	partial bool   // metadata only
	table   bool   // for kubectl get
}

// negotiate returns the first encoding of an Accept header that the server has.
func negotiate(accept string) media {
	for part := range strings.SplitSeq(accept, ",") {
		mediaType, params, err := mime.ParseMediaType(part)
		if err != nil || mediaType != jsonType && mediaType != protobufType || params["as"] == "Table" && params["v"] != "v1" {
			continue
		}
		return media{mediaType, strings.HasPrefix(params["as"], "PartialObjectMetadata"), params["as"] == "Table"}
	}
	return media{mime: jsonType}
}

// stream returns the content type of a watch.
func (m media) stream() string {
	if m.mime == protobufType {
		return protobufType + ";stream=watch"
	}
	return m.mime
}

// encode returns the encoded form of obj, which must have its kind.
func (m media) encode(obj runtime.Object) ([]byte, error) {
	var buf bytes.Buffer
	err := serializers[m.mime].Serializer.Encode(obj, &buf)
	return buf.Bytes(), err
}

// frame returns an event of a watch in its frame. raw is the encoded form of its object.
func (m media) frame(eventType watch.EventType, raw []byte) ([]byte, error) {
	stream := serializers[m.mime].StreamSerializer
	var event, framed bytes.Buffer
	e := &metav1.WatchEvent{Type: string(eventType), Object: runtime.RawExtension{Raw: bytes.TrimSuffix(raw, []byte("\n"))}}
	if err := stream.Serializer.Encode(e, &event); err != nil {
		return nil, err
	}
	_, err := stream.Framer.NewFrameWriter(&framed).Write(event.Bytes())
	return framed.Bytes(), err
}

// encode returns obj in the encoding that the client asked for.
func (s *Server) encode(c *call, obj runtime.Object) ([]byte, error) {
	encode := func() ([]byte, error) { return c.media.encode(c.view(obj)) }
	if _, ok := obj.(metav1.Object); !ok || c.media.table { // a list or a Status, which is the response to one request
		return encode()
	}
	return s.encodings.get(encoding{obj: obj, media: c.media}, encode)
}

// frame returns an event in the encoding that the client asked for.
func (s *Server) frame(c *call, e event) ([]byte, error) {
	encode := func() ([]byte, error) {
		raw, err := s.encode(c, e.obj)
		if err != nil {
			return nil, err
		}
		return c.media.frame(e.kind, raw)
	}
	if e.kind == watch.Error || e.kind == watch.Bookmark || c.media.table { // its object is that of one watch
		return encode()
	}
	return s.encodings.get(encoding{e.obj, c.media, e.kind}, encode)
}

// success returns obj in the encoding that the client asked for.
func (s *Server) success(c *call, code int, obj runtime.Object) *http.Response {
	m := c.media
	if m.mime == protobufType && !m.partial && c.res.custom {
		if _, ok := obj.(*metav1.Status); !ok {
			return c.failure(&apierrors.StatusError{ErrStatus: metav1.Status{
				Status: metav1.StatusFailure, Code: http.StatusNotAcceptable, Reason: metav1.StatusReasonNotAcceptable,
				Message: "only the following media types are accepted: " + jsonType,
			}})
		}
	}
	body, err := s.encode(c, obj)
	if err != nil {
		return c.failure(apierrors.NewInternalError(err))
	}
	return respond(code, m.mime, body)
}

// failure returns err as a response.
func (c *call) failure(err error) *http.Response {
	status := statusOf(err)
	body, err := c.media.encode(status)
	if err != nil {
		panic(err) // a Status can be encoded
	}
	return respond(int(status.Code), c.media.mime, body)
}

// statusOf returns the Status for err.
func statusOf(err error) *metav1.Status {
	status := metav1.Status{Status: metav1.StatusFailure, Code: http.StatusInternalServerError, Message: err.Error()}
	if s, ok := err.(apierrors.APIStatus); ok {
		status = s.Status()
	}
	status.Kind, status.APIVersion = "Status", "v1"
	return &status
}

// view returns obj with its kind, and as metadata if the client asked for that.
func (c *call) view(obj runtime.Object) runtime.Object {
	if _, ok := obj.(*metav1.Status); ok {
		return obj
	}
	switch {
	case c.media.table:
		return c.res.table(obj, time.Now())
	case !c.media.partial:
		return c.res.outgoing(obj)
	}
	if !meta.IsListType(obj) {
		return partial(obj)
	}
	list := &metav1.PartialObjectMetadataList{Items: []metav1.PartialObjectMetadata{}}
	list.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("PartialObjectMetadataList"))
	if from, err := meta.ListAccessor(obj); err == nil {
		list.ResourceVersion, list.Continue = from.GetResourceVersion(), from.GetContinue()
		list.RemainingItemCount = from.GetRemainingItemCount()
	}
	_ = meta.EachListItem(obj, func(item runtime.Object) error { // the function returns no error
		list.Items = append(list.Items, *partial(item))
		return nil
	})
	return list
}

// partial returns the metadata of obj.
func partial(obj runtime.Object) *metav1.PartialObjectMetadata {
	p := meta.AsPartialObjectMetadata(accessor(obj))
	p.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("PartialObjectMetadata"))
	return p
}

// outgoing returns a shallow copy of obj, an object or a list, that has its kind.
func (r *resource) outgoing(obj runtime.Object) runtime.Object {
	if _, ok := obj.(runtime.Unstructured); ok {
		return obj
	}
	out := shallow(obj)
	kind := r.kind
	if meta.IsListType(obj) {
		kind += "List"
	}
	out.GetObjectKind().SetGroupVersionKind(r.gvr.GroupVersion().WithKind(kind))
	return out
}

// shallow returns a copy of the struct behind obj. An unstructured object is copied completely.
func shallow(obj runtime.Object) runtime.Object {
	if _, ok := obj.(runtime.Unstructured); ok {
		return obj.DeepCopyObject()
	}
	from := reflect.ValueOf(obj).Elem()
	to := reflect.New(from.Type())
	to.Elem().Set(from)
	return to.Interface().(runtime.Object)
}

// decode returns the object in data, with the defaults of its kind.
func (r *resource) decode(contentType string, data []byte) (runtime.Object, error) {
	obj := r.object()
	if err := decodeInto(contentType, data, obj); err != nil {
		return nil, err
	}
	r.normalize(obj)
	return obj, nil
}

// normalize removes from a new object what the server does not store, and sets the defaults of its kind.
func (r *resource) normalize(obj runtime.Object) {
	if !r.custom {
		obj.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	}
	accessor(obj).SetManagedFields(nil)
	if r.defaults != nil {
		r.defaults(obj)
	}
}

// decodeInto decodes JSON or protobuf into a typed or unstructured object.
func decodeInto(contentType string, data []byte, into any) error {
	if contentType == protobufType {
		var unknown runtime.Unknown
		message, ok := into.(interface{ Unmarshal([]byte) error })
		if !ok || len(data) < 4 {
			return fmt.Errorf("the body is not a protobuf object")
		}
		if err := unknown.Unmarshal(data[4:]); err != nil { // after the magic number
			return err
		}
		return message.Unmarshal(unknown.Raw)
	}
	if u, ok := into.(*unstructured.Unstructured); ok {
		return u.UnmarshalJSON(data)
	}
	return kjson.UnmarshalCaseSensitivePreserveInts(data, into)
}

// encodeJSON returns the JSON form of a stored object.
func (r *resource) encodeJSON(obj runtime.Object) []byte {
	data, err := json.Marshal(r.outgoing(obj))
	if err != nil {
		panic(fmt.Sprintf("encoding a stored object: %v", err)) // it was decoded before
	}
	return data
}

// encodeProtobuf returns the protobuf form of a stored object that is not custom, without its kind.
func encodeProtobuf(obj runtime.Object) []byte {
	data, err := obj.(interface{ Marshal() ([]byte, error) }).Marshal()
	if err != nil {
		panic(fmt.Sprintf("encoding a stored object: %v", err)) // it was decoded before
	}
	return data
}

// encodings holds the encoded forms of objects: the response to a write and the watches of all clients have the same.
type encodings struct {
	mu    sync.Mutex
	known map[encoding][]byte
}

// encoding identifies an encoded form of an object, which must not be modified any more.
type encoding struct {
	obj   runtime.Object
	media media
	event watch.EventType // empty: the object itself
}

// get returns the encoded form k, for which it calls encode once.
func (e *encodings) get(k encoding, encode func() ([]byte, error)) ([]byte, error) {
	e.mu.Lock()
	data, ok := e.known[k]
	e.mu.Unlock()
	if ok {
		return data, nil
	}
	data, err := encode()
	if err == nil {
		e.mu.Lock()
		e.known[k] = data
		e.mu.Unlock()
	}
	return data, err
}

// accessor returns the metadata of an object that the server handles.
func accessor(obj runtime.Object) metav1.Object {
	m, err := meta.Accessor(obj)
	if err != nil {
		panic(err) // all kinds have metadata
	}
	return m
}
