// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

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

// createRequest returns the request for c: that of the last call of this process, or the recorded one, while it binds, else the one for
// class, which is nil if it does not exist. A snapshot that may remain has the name of the last one.
func (d driver) createRequest(c *content, class *class, e entry) (*createRequest, error) {
	last := requestWith(e.Args, c.UID)
	if last == nil {
		last, _ = c.recordedRequest() // of an earlier process
	}
	if last != nil && c.binds(e) {
		return last, nil
	}
	request, err := d.newRequest(c, class)
	if err == nil && last != nil && e.Payload.remains != "" {
		request.Name = last.Name
	}
	return request, err
}

// classOfOther is the error for a content whose class is for another driver, which reports it.
type classOfOther struct{ error }

// newRequest returns the request for c and its class.
func (d driver) newRequest(c *content, class *class) (*createRequest, error) {
	switch {
	case c.class == "":
		return nil, inputsError(c, fmt.Sprintf("failed to take %s %s without a %[1]s class", c.noun, c.Name))
	case class == nil:
		return nil, inputsError(c, fmt.Sprintf("%s %q not found", c.kind.class, c.class))
	case class.driver != d.name:
		return nil, classOfOther{inputsError(c, fmt.Sprintf("%s %q is for driver %q", c.kind.class, c.class, class.driver))}
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

// sidecarParameters are the class parameters that are not for the driver, without [volumerules.ParameterPrefix].
var sidecarParameters = []string{
	"snapshotter-secret-name", "snapshotter-secret-namespace", "snapshotter-list-secret-name", "snapshotter-list-secret-namespace",
	"group-snapshotter-secret-name", "group-snapshotter-secret-namespace",
	"group-snapshotter-get-secret-name", "group-snapshotter-get-secret-namespace",
}

// driverParameters returns the parameters of a class without those for sidecars. It returns an error for an unknown key with their prefix.
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
