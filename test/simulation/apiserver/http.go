// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"io"
	"net/http"
)

// Handler serves clients over HTTP. The client of a request in [Hooks] is its user agent.
func (s *Server) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		resp, err := transport{s, r.UserAgent()}.RoundTrip(r)
		if err != nil {
			panic(http.ErrAbortHandler) // an error of the network: the connection breaks
		}
		defer resp.Body.Close()
		for k, v := range resp.Header {
			w.Header()[k] = v
		}
		w.WriteHeader(resp.StatusCode)
		if _, watching := resp.Body.(*watcher); !watching {
			_, _ = io.Copy(w, resp.Body) // a client that has gone gets no response
			return
		}
		flusher := http.NewResponseController(w)
		_ = flusher.Flush()
		buf := make([]byte, 32<<10)
		for {
			n, err := resp.Body.Read(buf)
			_, failed := w.Write(buf[:n])
			if err == io.EOF || failed != nil {
				return
			}
			if err != nil {
				panic(http.ErrAbortHandler)
			}
			_ = flusher.Flush()
		}
	})
}
