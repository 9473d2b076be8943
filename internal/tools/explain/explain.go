// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
)

// Clients read the cluster.
type Clients struct {
	apiread.Clients
	Status *http.Client // for Request.StatusURL, see [statusz.NewClient]; nil sends no credentials
}

// The kinds that can be explained.
const (
	KindPod        = "Pod"
	KindClaim      = "PersistentVolumeClaim"
	KindVolume     = "PersistentVolume"
	KindAttachment = "VolumeAttachment"
	KindNode       = "Node"
	KindSnapshot   = "VolumeSnapshot"
)

// Request names the object to explain.
type Request struct {
	Kind      string // one of the constants
	Namespace string // of a pod, a claim or a snapshot
	Name      string
	StatusURL string // of a running process; "" reads no status page
}

// Namespaced reports whether objects of a kind have a namespace.
func Namespaced(kind string) bool {
	return kind == KindPod || kind == KindClaim || kind == KindSnapshot
}

func (r Request) String() string { return apiread.Name(r.Kind, r.Namespace, r.Name) }

// ErrNotFound reports that the object does not exist.
var ErrNotFound = errors.New("not found")

// Explain reads the object and everything related to it, and returns a report. It fails if the object itself cannot
// be read; other failed reads are findings of the report.
func Explain(ctx context.Context, clients Clients, request Request) (Report, error) {
	g := newGatherer(clients, request)
	kinds := map[string]struct {
		gather  func(context.Context) error
		explain func(*facts) Report
	}{
		KindPod:        {g.gatherPod, explainPod},
		KindClaim:      {g.gatherClaim, explainClaim},
		KindVolume:     {g.gatherVolume, explainVolume},
		KindAttachment: {g.gatherAttachment, explainAttachment},
		KindSnapshot:   {g.gatherSnapshot, explainVolumeSnapshot},
		KindNode:       {g.gatherNode, func(f *facts) Report { return explainNode(f, request.Name) }},
	}
	kind, ok := kinds[request.Kind]
	if !ok {
		return Report{}, fmt.Errorf("kind %q cannot be explained", request.Kind)
	}
	if err := kind.gather(ctx); err != nil {
		return Report{}, err
	}
	if request.StatusURL != "" {
		p := &statusPage{url: request.StatusURL}
		p.page, p.err = statusz.Read(ctx, cmp.Or(clients.Status, http.DefaultClient), p.url, false)
		g.facts.process = p
	}
	g.facts.setNow(clients.Clock.Now())
	return kind.explain(g.facts), nil
}

// wrap returns the error of reading the object itself with its cause and a hint.
func (r Request) wrap(err error) error {
	switch {
	case apiread.IsUnserved(err) && r.Kind == KindSnapshot:
		return fmt.Errorf("%v: the cluster does not serve this kind. Install the snapshot CRDs and the snapshot-controller", r)
	case apiread.IsUnserved(err): // every API server serves the kinds that can be explained
		return fmt.Errorf("%v: the server is not a Kubernetes API server: %w. Check --kubeconfig and --master", r, err)
	case apierrors.IsNotFound(err) && Namespaced(r.Kind):
		return fmt.Errorf("%v: %w. Check the name and the namespace (-n)", r, ErrNotFound)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%v: %w. Check the name", r, ErrNotFound)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%v: permission denied: %w. Ask the cluster administrator for permission to get it", r, err)
	}
	return fmt.Errorf("%v: reading from the API server failed: %w. Check --kubeconfig and --master", r, err)
}
