// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"context"
	"fmt"
	"strings"
	"unicode"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// maxText bounds the text of an error, in bytes.
	maxText = 4 << 10
	// maxID bounds an ID, in bytes. The CSI spec allows 128 to 256.
	maxID = 1 << 10
	// maxResponse bounds a response, in bytes. It is not exactly the limit of gRPC servers, 4 MiB, so that [refused] can tell the
	// limit of the driver from this one.
	maxResponse = 4<<20 + 1
	// maxListResponse bounds a response of listMethods, and all pages of a list together. A response without pages has a few hundred
	// bytes per volume.
	maxListResponse = 256 << 20
)

var listMethods = map[string]bool{"/csi.v1.Controller/ListVolumes": true, "/csi.v1.Controller/ListSnapshots": true}

// limited is the innermost interceptor. It bounds the responses of the driver, and replaces its error by one with a bounded text and
// a code of gRPC.
func limited(
	ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	size := maxResponse
	if listMethods[method] {
		size = maxListResponse
	}
	err := invoke(ctx, method, request, response, conn, append(opts, grpc.MaxCallRecvMsgSize(size))...)
	if s, ok := status.FromError(err); ok && err != nil {
		code, message := s.Code(), s.Message()
		if code > codes.Unauthenticated { // no code of gRPC: it would become the value of a label
			code = codes.Unknown
		}
		// One text, whether the driver or this client is the first to end the call.
		if code == codes.DeadlineExceeded && strings.HasPrefix(message, "stream terminated by RST_STREAM") {
			message = context.DeadlineExceeded.Error()
		}
		return status.Error(code, Printable(message))
	}
	return err
}

// Printable returns a text of the driver as logs, events and pages can show it: at most [maxText] bytes of UTF-8 in one line, without
// characters that are invisible or change the order of others. It does not keep a long s in memory.
func Printable(s string) string {
	end := ""
	if len(s) > maxText {
		s, end = strings.Clone(s[:maxText]), "…"
	}
	return strings.Map(func(r rune) rune {
		switch {
		case !unprintable(r):
			return r
		case unicode.IsSpace(r):
			return ' '
		}
		return '?'
	}, strings.ToValidUTF8(s, "")) + end
}

// unprintable reports whether r is a control character, a line separator, or a mark of bidirectional text.
func unprintable(r rune) bool {
	return unicode.In(r, unicode.Cc, unicode.Zl, unicode.Zp, unicode.Bidi_Control)
}

// CheckID returns an error unless id can be stored in objects and shown: the driver returned it as field of a response.
func CheckID(field, id string) error {
	switch {
	case len(id) > maxID:
		return fmt.Errorf("the driver returned a %s of %d bytes, more than %d; this is a driver bug", field, len(id), maxID)
	case strings.ContainsFunc(id, unprintable):
		return fmt.Errorf("the driver returned the %s %q, which has control characters; this is a driver bug", field, id)
	}
	return nil
}
