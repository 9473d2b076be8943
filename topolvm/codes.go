// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// errShutdown is the cause of a context that ended because the process exits.
var errShutdown = errors.New("the process shuts down")

// subject names the LogicalVolume of a message. Empty fields are left out, apart from class.
type subject struct {
	lv, node string
	class    *string
}

// subjectOf returns the subject of lv.
func subjectOf(lv *LogicalVolume) subject {
	return subject{lv.Name, lv.Spec.NodeName, &lv.Spec.DeviceClass}
}

func (s subject) String() string {
	text := "LogicalVolume " + s.lv
	if s.node != "" {
		text += " on node " + s.node
	}
	switch {
	case s.class == nil:
	case *s.class == "":
		text += " of the default device class"
	default:
		text += " of device class " + *s.class
	}
	return text
}

// errorf returns the error of a call. Retries in the same state return the same text, because it becomes an event: it has no times and
// no versions.
func (s subject) errorf(code codes.Code, format string, args ...any) error {
	return status.Error(code, kube.Message(s.String()+": "+fmt.Sprintf(format, args...)))
}

// nodeError returns the error for a failure of topolvm-node. It does not return a code that means "indeterminate", because a failed
// LogicalVolume is deleted.
func nodeError(lv *LogicalVolume, creating bool) error {
	s, message := subjectOf(lv), fmt.Sprintf("%.400s", lv.Status.Message)
	switch code := lv.code(); {
	case code == codes.ResourceExhausted:
		return s.errorf(code, "topolvm-node has too little space: %s. Free space on the node, or use another node", message)
	case code == codes.OutOfRange, code == codes.InvalidArgument, code == codes.FailedPrecondition:
		return s.errorf(code, "topolvm-node refused it: %s. Check the StorageClass and the configuration of lvmd", message)
	case code == codes.NotFound && creating && lv.Spec.Source == "":
		return s.errorf(codes.ResourceExhausted, "lvmd does not have the device class: %s. Add it to lvmd, or use another node", message)
	case code == codes.Unimplemented && creating && lv.Spec.Source != "":
		return s.errorf(codes.InvalidArgument, "the device class is not thin: %s. Use a thin class for snapshots and clones", message)
	default:
		return s.errorf(codes.Internal, "topolvm-node failed with code %d: %s. Check its logs and those of lvmd", uint32(code), message)
	}
}

// isIndeterminate reports whether the code of err leaves open whether a volume exists.
func isIndeterminate(err error) bool {
	switch status.Code(err) {
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted:
		return true
	}
	return false
}

// apiError returns the error of a call for a failed request to the API server. doing says what the request was for. The code is not
// final: the LogicalVolume of an earlier call may exist.
func apiError(ctx context.Context, s subject, doing string, err error) error {
	switch {
	case ctx.Err() != nil:
		return contextError(ctx, s, doing, "the API server")
	case apierrors.IsForbidden(err):
		return s.errorf(codes.Unavailable, "%s: forbidden: %v. Grant the permission to the ServiceAccount", doing, err)
	}
	return s.errorf(codes.Unavailable, "%s: %v. The call can be repeated", doing, err)
}

// contextError returns the error of a call whose context has ended while it waited for a component. The LogicalVolume stays: the caller
// repeats the call.
func contextError(ctx context.Context, s subject, doing, component string) error {
	switch {
	case errors.Is(context.Cause(ctx), errShutdown):
		return s.errorf(codes.Unavailable, "%s: %v. Repeat the call", doing, errShutdown)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return s.errorf(codes.DeadlineExceeded, "%s: no result before the deadline. Check %s, and repeat the call", doing, component)
	}
	return s.errorf(codes.Canceled, "%s: canceled. Repeat the call", doing)
}
