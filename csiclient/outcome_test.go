// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

func TestOutcomeOf(t *testing.T) {
	unknown := map[codes.Code]bool{codes.Canceled: true, codes.DeadlineExceeded: true, codes.Unavailable: true, codes.Aborted: true}
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		want := Final
		if unknown[code] {
			want = Indeterminate
		}
		if got := OutcomeOf(fmt.Errorf("calling: %w", status.Error(code, "x"))); got != want {
			t.Errorf("%v is %v, want %v", code, got, want)
		}
	}
	for message, want := range map[string]Outcome{
		fmt.Sprintf("grpc: received message larger than max (9 vs. %d)", maxResponse):     Indeterminate, // the response
		fmt.Sprintf("grpc: received message larger than max (9 vs. %d)", maxListResponse): Indeterminate,
		"grpc: received message larger than max (5000000 vs. 4194304)":                    Final,
		"received 9-bytes data exceeding the limit 8 bytes":                               Indeterminate,
		"received HTTP status 507 from the storage system":                                Final,
	} {
		if got := OutcomeOf(status.Error(codes.ResourceExhausted, message)); got != want {
			t.Errorf("%s is %v, want %v", message, got, want)
		}
	}
	if got := OutcomeOf(status.Error(codes.InvalidArgument, "received no size")); got != Final {
		t.Errorf("a message of the driver is %v", got)
	}
	if got := OutcomeOf(errors.New("not of gRPC")); got != Indeterminate {
		t.Errorf("an error without status is %v", got)
	}
}

// TestOutcomeOfABrokenResponse: a driver whose server is not gRPC-Go may create a volume and answer like this.
func TestOutcomeOfABrokenResponse(t *testing.T) {
	for name, answer := range map[string]http.HandlerFunc{
		"stream is reset": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"stream is reset after the headers": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		},
		"no trailers": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			_, _ = w.Write([]byte{0, 0, 0, 0, 0})
		},
		"no response message": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			w.Header().Set("Trailer", "Grpc-Status")
			w.Header().Set("Grpc-Status", "0")
		},
		"malformed message": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			w.Header().Set("Trailer", "Grpc-Status")
			_, _ = w.Write([]byte{0, 0, 0, 0, 1, 0xff})
			w.Header().Set("Grpc-Status", "0")
		},
		"message cut short": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			w.Header().Set("Trailer", "Grpc-Status")
			_, _ = w.Write([]byte{0, 0, 0, 0, 5, 1})
			w.Header().Set("Grpc-Status", "0")
		},
		"no status": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			w.Header().Set("Trailer", "X")
			_, _ = w.Write([]byte{0, 0, 0, 0, 0})
			w.Header().Set("X", "y")
		},
		"not gRPC": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "x", http.StatusInternalServerError) },
	} {
		t.Run(name, func(t *testing.T) {
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			server := &http.Server{Handler: answer, Protocols: &http.Protocols{}}
			server.Protocols.SetUnencryptedHTTP2(true)
			go func() { _ = server.Serve(listener) }()
			defer server.Close()
			conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_, err = csi.NewControllerClient(conn).CreateVolume(t.Context(), &csi.CreateVolumeRequest{})
			if err == nil || OutcomeOf(fmt.Errorf("calling: %w", err)) != Indeterminate {
				t.Errorf("%v is final", err)
			}
		})
	}
}
