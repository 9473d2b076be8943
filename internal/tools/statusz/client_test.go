// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package statusz

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
)

// write returns the path of a file with content.
func write(t *testing.T, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestSecureStatusPage reads the page of a process with --secure-metrics-server, which requires a bearer token.
func TestSecureStatusPage(t *testing.T) {
	page := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch authorization := r.Header.Get("Authorization"); {
		case r.URL.Path == "/away":
			http.Redirect(w, r, "/statusz", http.StatusFound)
		case authorization == "Bearer reader" || authorization == "" && r.TLS == nil:
			_, _ = w.Write([]byte(`{"program":"storage-controller","plan":{}}`))
		case authorization == "Bearer stranger":
			w.WriteHeader(http.StatusForbidden)
		default:
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	secure, plain := httptest.NewTLSServer(page), httptest.NewServer(page)
	defer secure.Close()
	defer plain.Close()
	ca := write(t, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}))
	for name, tt := range map[string]struct {
		token  string // of the kubeconfig
		url    string
		access Access
		want   string // of the error; "" for none
	}{
		"token of the kubeconfig": {"reader", secure.URL, Access{CAFile: ca}, ""},
		"token of a file":         {"stranger", secure.URL, Access{CAFile: ca, TokenFile: write(t, []byte("reader"))}, ""},
		"any certificate":         {"reader", secure.URL, Access{Insecure: true}, ""},
		"unknown certificate":     {"reader", secure.URL, Access{}, "Set --status-ca-file"},
		"invalid CA file": {"reader", secure.URL, Access{CAFile: write(t, []byte("none"))},
			"connecting to the status page"},
		"no token": {"", secure.URL, Access{CAFile: ca}, "401 Unauthorized. Set --status-token-file"},
		"token without permission": {"stranger", secure.URL, Access{CAFile: ca},
			"403 Forbidden. Grant the user get on the nonResourceURL /statusz"},
		"redirects are not followed": {"reader", secure.URL + "/away", Access{CAFile: ca}, "302 Found"},
		"no token in plain text":     {"reader", plain.URL, Access{}, ""},
		"an invalid URL":             {"reader", "localhost:8080", Access{}, "invalid URL"},
	} {
		t.Run(name, func(t *testing.T) {
			user := &rest.Config{Host: "https://api.example.com", BearerToken: tt.token}
			user.CAData = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw})
			client, err := NewClient(user, tt.url, tt.access)
			if err == nil {
				_, err = Read(t.Context(), client, tt.url, false)
			}
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}
