// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestSuspendedProcessKeepsTheRecord: the response to a call is not written over the record of the next leader, which repeats the call. The
// process is suspended while it reads that record, after its write has failed, and continues after its Lease has expired.
func TestSuspendedProcessKeepsTheRecord(t *testing.T) {
	f := scenario(t, expands, nil)
	var writes atomic.Int32
	answered, renewed := make(chan struct{}), make(chan struct{})
	f.api.refuse(func(r *http.Request) *http.Response {
		switch {
		case isWrite(r, "/status") && writes.Add(1) == 2:
			close(answered)
			<-renewed
		case r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/persistentvolumeclaims/") && writes.Load() == 2:
			f.Expire()
		}
		return nil
	})
	f.Plugin.Next(expandMethod, csitest.Fail(codes.OutOfRange, "x"))
	f.create("c1", nil)
	f.request("c1", "11Gi")
	<-answered
	claim := f.claim("c1")
	next := claim.DeepCopy()
	renew(next, corev1.PersistentVolumeClaimResizing, time.Now())
	patch, err := patchOf(claim, next)
	f.Must(err)
	_, err = f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Patch(t.Context(), "c1", types.StrategicMergePatchType, patch,
		metav1.PatchOptions{}, "status")
	f.Must(err)
	close(renewed)
	f.Refuses(expandMethod)
	f.is("c1", "C=1Gi A=11Gi "+progress+" P=1Gi Resizing")
}
