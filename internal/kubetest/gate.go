// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"net/http"
	"sync"
)

// GatedWriter holds back the response to a request of [Proxy], such as the events of a watch, while another goroutine has Gate.
type GatedWriter struct {
	http.ResponseWriter
	Gate sync.Locker
}

// Write writes p when the gate is open.
func (w GatedWriter) Write(p []byte) (int, error) {
	w.Gate.Lock()
	defer w.Gate.Unlock()
	return w.ResponseWriter.Write(p)
}

// Unwrap lets the proxy flush a watch.
func (w GatedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
