// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// createRequest is the part of a CreateSnapshot or CreateVolumeGroupSnapshot request that depends on
// the class and the settings. It is recorded in [AnnRequest] before the first call. Every repetition
// uses the record, so that a changed class or prefix never causes a second snapshot.
type createRequest struct {
	Name       string            `json:"name"`
	Parameters map[string]string `json:"parameters,omitempty"`
	// UID is the UID of the content. A copy of a content, for example from a backup, has the record of another
	// one, and must not share its snapshot.
	UID types.UID `json:"uid,omitempty"`
}

// encode returns the value of [AnnRequest].
func (r createRequest) encode() string { return encoded(r) }

// encodeAgain returns a value of [AnnRequest] that differs from all others.
func (r createRequest) encodeAgain() string {
	return encoded(struct {
		createRequest
		ID types.UID `json:"id"`
	}{r, uuid.NewUUID()})
}

func encoded(record any) string {
	text, err := json.Marshal(record)
	if err != nil {
		panic(err) // strings have an encoding
	}
	return string(text)
}

// recordedRequest returns the request that is recorded on c, or nil if there is none.
func (c *content) recordedRequest() (*createRequest, error) {
	text, ok := c.Annotations[AnnRequest]
	if !ok {
		return nil, nil
	}
	var r createRequest
	err := json.Unmarshal([]byte(text), &r)
	switch {
	case err != nil:
	case r.Name == "":
		err = errors.New("it has no name")
	case r.UID != "" && r.UID != c.UID:
		err = fmt.Errorf("it is a copy from an object with UID %s", r.UID)
	}
	if err != nil {
		return nil, fmt.Errorf("annotation %s of %s %q is ignored: %w. The request is computed from the class and the settings",
			AnnRequest, c.kind.name, c.Name, err)
	}
	return &r, nil
}

// args returns the arguments of the call with r, for its [intent.Entry].
func (r createRequest) args() string {
	return encoded(createRequest{Name: r.Name, Parameters: r.Parameters})
}

// requestWith returns the request with the arguments of an entry, for the content with that UID, or nil if there are none.
func requestWith(args string, uid types.UID) *createRequest {
	if args == "" {
		return nil
	}
	r := createRequest{UID: uid}
	if err := json.Unmarshal([]byte(args), &r); err != nil {
		panic(err) // the result of args
	}
	return &r
}

// equal reports whether both are the same request to the driver.
func (r createRequest) equal(other *createRequest) bool { return r.args() == other.args() }

// binds reports whether every call must repeat the recorded request of c: the snapshot exists, or may have been created by an
// earlier call. After a definite error, a changed class or name replaces the record.
func (c *content) binds(e entry) bool {
	return c.known().handle != "" || e.State != intent.Planned && e.State != intent.Settled
}

// createRequest returns the request for c: that of an unanswered call of this process, or the recorded one, or that of an earlier call
// of this process, while it binds, else the one for class, which is nil if it does not exist. A snapshot that may remain has the
// recorded name.
func (d driver) createRequest(c *content, class *class, e entry) (*createRequest, error) {
	recorded, malformed := c.recordedRequest()
	if malformed != nil || recorded == nil || e.State.Unanswered() && !e.Payload.inherited {
		recorded = requestWith(e.Args, c.UID)
	}
	if recorded != nil && c.binds(e) {
		return recorded, nil
	}
	request, err := d.newRequest(c, class)
	if err != nil || recorded == nil {
		return request, err
	}
	if e.Payload.remains != "" {
		request.Name = recorded.Name
	}
	if request.equal(recorded) {
		return recorded, nil
	}
	return request, nil
}

// newRequest returns the request for c and its class.
func (d driver) newRequest(c *content, class *class) (*createRequest, error) {
	switch {
	case c.class == "":
		return nil, inputsError(c, fmt.Sprintf("failed to take %s %s without a %[1]s class", c.noun, c.Name))
	case class == nil:
		return nil, inputsError(c, fmt.Sprintf("%s %q not found", c.kind.class, c.class))
	case class.driver != d.name:
		return nil, inputsError(c, fmt.Sprintf("%s %q is for driver %q", c.kind.class, c.class, class.driver))
	}
	parameters, err := driverParameters(class.parameters)
	if err != nil {
		return nil, err
	}
	prefix, length := d.SnapshotNamePrefix, d.SnapshotNameUUIDLength
	if c.group {
		prefix, length = d.GroupSnapshotNamePrefix, d.GroupSnapshotNameUUIDLength
	}
	if d.ExtraCreateMetadata {
		maps.Copy(parameters, extraMetadata(c))
	}
	return &createRequest{snapshotName(prefix, length, c.ref.UID), parameters, c.UID}, nil
}

// sidecarParameters are the class parameters that are not for the driver, without
// [volumerules.ParameterPrefix].
var sidecarParameters = []string{
	"snapshotter-secret-name", "snapshotter-secret-namespace", "snapshotter-list-secret-name", "snapshotter-list-secret-namespace",
	"group-snapshotter-secret-name", "group-snapshotter-secret-namespace",
	"group-snapshotter-get-secret-name", "group-snapshotter-get-secret-namespace",
}

// driverParameters returns the parameters of a class without those for sidecars. It returns an error
// for an unknown key with their prefix.
func driverParameters(parameters map[string]string) (map[string]string, error) {
	kept := map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		name, reserved := strings.CutPrefix(key, volumerules.ParameterPrefix)
		switch {
		case !reserved:
			kept[key] = parameters[key]
		case !slices.Contains(sidecarParameters, name):
			return nil, fmt.Errorf("failed to remove CSI Parameters of prefixed keys: "+
				"found unknown parameter key %q with reserved namespace %s", key, volumerules.ParameterPrefix)
		}
	}
	return kept, nil
}

// extraMetadata returns the parameters of --extra-create-metadata.
func extraMetadata(c *content) map[string]string {
	object := volumerules.ParameterPrefix + c.parameter
	return map[string]string{object + "/name": c.ref.Name, object + "/namespace": c.ref.Namespace, object + "content/name": c.Name}
}
