// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package serving

import (
	"crypto/x509"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestValidity checks a certificate before, during and after its lifetime.
func TestValidity(t *testing.T) {
	leaf := &x509.Certificate{NotBefore: time.Unix(100, 0), NotAfter: time.Unix(200, 0)}
	for at, want := range map[int64]string{99: "not valid before", 100: "", 200: "", 201: "expired at"} {
		err := validAt(leaf, time.Unix(at, 0))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("at %d: %v, want %q", at, err, want)
		}
	}
}

// TestSelfSigned expects that a self-signed certificate is replaced before it expires, and that one from files which expires is still
// served, but not ready.
func TestSelfSigned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		own, files := &SelfSigned{}, &Certificate{}
		certificate := func() *x509.Certificate {
			t.Helper()
			c, err := own.Get(nil)
			if err != nil {
				t.Fatal(err)
			}
			files.state.Store(&certificateState{pair: c})
			if err := files.Ready(); err != nil {
				t.Error(err)
			}
			return c.Leaf
		}
		first := certificate()
		time.Sleep(time.Until(first.NotAfter) - renewBefore)
		if certificate() != first {
			t.Error("renewed too early")
		}
		time.Sleep(time.Nanosecond)
		next := certificate()
		if next == first {
			t.Error("not renewed before it expires")
		}
		time.Sleep(time.Until(next.NotAfter) + time.Second)
		if err := files.Ready(); err == nil || !strings.Contains(err.Error(), "expired at") {
			t.Errorf("ready: %v", err)
		}
		if _, err := files.Get(nil); err != nil {
			t.Error(err)
		}
	})
}
