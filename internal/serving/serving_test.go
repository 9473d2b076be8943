// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package serving

import (
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"
)

var discard = log.New(io.Discard, "", 0)

// idleProcess is less than the memory of an idle process of the program.
const idleProcess = 20 << 20

// TestIncompleteRequests expects a response while thousands of clients have sent half of a header, and no memory for most of them.
func TestIncompleteRequests(t *testing.T) {
	for _, scheme := range []string{"http", "https"} {
		t.Run(scheme, func(t *testing.T) {
			server := httptest.NewUnstartedServer(nil)
			server.Config = New(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") }))
			server.Config.ErrorLog = discard
			start := server.Start
			if scheme == "https" {
				start = server.StartTLS
			}
			start()
			defer server.Close()
			client := server.Client()
			client.Timeout = time.Minute
			probe := func() {
				t.Helper()
				response, err := client.Get(server.URL)
				if err != nil {
					t.Fatal(err)
				}
				defer response.Body.Close()
				if body, err := io.ReadAll(response.Body); err != nil || string(body) != "ok" {
					t.Errorf("%q, %v", body, err)
				}
			}
			probe()
			before := memory()
			half := "GET / HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 6000)
			var conns []net.Conn
			for i := range 3000 {
				conn, err := net.Dial("tcp", server.Listener.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				switch {
				case scheme == "https" && i%10 == 0:
					secure := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}})
					if secure.Handshake() == nil {
						_, _ = io.WriteString(secure, half)
					}
				case scheme == "https":
					_, _ = io.WriteString(conn, "\x16\x03\x01\x10\x00"+half) // half of a handshake
				default:
					_, _ = io.WriteString(conn, half)
				}
				conns = append(conns, conn)
				if i%500 == 0 {
					probe()
				}
			}
			probe()
			if grown := memory() - before; grown > idleProcess {
				t.Errorf("%d KiB more, an idle process has %d KiB", grown>>10, idleProcess>>10)
			}
			runtime.KeepAlive(conns)
		})
	}
}

// memory returns the bytes that the heap and the stacks use.
func memory() uint64 {
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc + stats.StackInuse
}

// TestServedConnectionsAreClosedLast fills a server with requests that are being served, and expects one more response.
func TestServedConnectionsAreClosedLast(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	server := httptest.NewUnstartedServer(nil)
	server.Config = New(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			begun <- struct{}{}
			<-release
		}
		fmt.Fprint(w, "ok")
	}))
	open := &connections{open: map[net.Conn]connection{}}
	server.Config.ConnState = open.changed
	server.Start()
	defer server.Close()
	// The server closes a connection a little after the client has the response.
	closed := func() {
		for n := maxConnections; n >= maxConnections; time.Sleep(time.Millisecond) {
			open.mu.Lock()
			n = len(open.open)
			open.mu.Unlock()
		}
	}
	codes := make(chan error)
	get := func(path string) error {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
		response, err := client.Get(server.URL + path)
		if err == nil {
			response.Body.Close()
		}
		return err
	}
	idle, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer idle.Close()
	for range maxConnections - 1 {
		go func() { codes <- get("/slow") }()
		<-begun
	}
	if err := get("/"); err != nil { // instead of idle
		t.Error(err)
	}
	if _, err := idle.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the idle connection: %v", err)
	}
	closed()
	go func() { codes <- get("/slow") }()
	<-begun
	if err := get("/"); err != nil { // instead of the slow one that waits longest
		t.Error(err)
	}
	close(release)
	failed := 0
	for range maxConnections {
		if err := <-codes; err != nil {
			failed++
		}
	}
	if failed != 1 {
		t.Errorf("%d of %d requests that were being served have failed, want 1", failed, maxConnections)
	}
}

// TestLongHeader: 8 KiB are enough for every token.
func TestLongHeader(t *testing.T) {
	server := httptest.NewUnstartedServer(nil)
	server.Config = New(http.NotFoundHandler())
	server.Start()
	defer server.Close()
	for size, want := range map[int]int{7 << 10: http.StatusNotFound, 20 << 10: http.StatusRequestHeaderFieldsTooLarge} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Authorization", "Bearer "+strings.Repeat("x", size))
		response, err := server.Client().Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != want {
			t.Errorf("a header of %d bytes: %d", size, response.StatusCode)
		}
	}
}

// TestRequestsOfAConnection: more requests at a time than one connection may have are sent on two.
func TestRequestsOfAConnection(t *testing.T) {
	release, arrived := make(chan struct{}), make(chan string)
	server := httptest.NewUnstartedServer(nil)
	server.Config = New(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		arrived <- r.RemoteAddr
		<-release
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	defer close(release)
	connections := map[string]int{}
	for range maxStreams + 1 {
		go func() {
			if response, err := server.Client().Get(server.URL); err == nil {
				response.Body.Close()
			}
		}()
		connections[<-arrived]++
	}
	if len(connections) != 2 {
		t.Errorf("requests by connection: %v", connections)
	}
}
