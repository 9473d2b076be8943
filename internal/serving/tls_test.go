// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package serving

import (
	"crypto/tls"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestTLS expects that a server with each configuration accepts the clients that the configuration permits, and no others, or that
// the configuration is an error.
func TestTLS(t *testing.T) {
	client := func(most uint16, suites ...uint16) *tls.Config {
		return &tls.Config{InsecureSkipVerify: true, MaxVersion: most, MinVersion: tls.VersionTLS10, CipherSuites: suites}
	}
	const chacha, aes = tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256
	onlyAES := []string{"TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_AES_128_GCM_SHA256"}
	for name, tt := range map[string]struct {
		config            TLS
		err               string
		accepted, refused *tls.Config
	}{
		"default":         {TLS{}, "", client(tls.VersionTLS12), client(tls.VersionTLS11)},
		"1.3":             {TLS{MinVersion: "VersionTLS13"}, "", client(tls.VersionTLS13), client(tls.VersionTLS12)},
		"1.1":             {TLS{MinVersion: "VersionTLS11"}, "", client(tls.VersionTLS11), client(tls.VersionTLS10)},
		"cipher suites":   {TLS{CipherSuites: onlyAES}, "", client(tls.VersionTLS12, aes), client(tls.VersionTLS12, chacha)},
		"suites of 1.3":   {TLS{"VersionTLS13", onlyAES[1:]}, "", client(tls.VersionTLS13), client(tls.VersionTLS12)},
		"unknown version": {TLS{MinVersion: "1.2"}, `--tls-min-version: must be one of VersionTLS10, VersionTLS11, VersionTLS12, `, nil, nil},
		"unknown suite":   {TLS{CipherSuites: []string{"ECDHE-RSA-AES128-GCM-SHA256"}}, `unknown cipher suite "ECDHE-RSA-AES128-GCM`, nil, nil},
		"no suite for HTTP/2": {TLS{CipherSuites: []string{"TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384"}},
			"--tls-cipher-suites: HTTP/2 requires TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 or ", nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			config, err := tt.config.Config(new(SelfSigned).Get)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("got %v, want %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			server := httptest.NewUnstartedServer(http.NotFoundHandler())
			server.TLS, server.EnableHTTP2, server.Config.ErrorLog = config, true, discard
			server.StartTLS()
			defer server.Close()
			dial := func(client *tls.Config) error {
				conn, err := tls.Dial("tcp", server.Listener.Addr().String(), client)
				if err == nil {
					err = conn.Close()
				}
				return err
			}
			if err := dial(tt.accepted); err != nil {
				t.Errorf("a permitted client: %v", err)
			}
			if dial(tt.refused) == nil {
				t.Error("another client is served")
			}
		})
	}
}
