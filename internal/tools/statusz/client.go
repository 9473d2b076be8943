// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package statusz

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"k8s.io/client-go/rest"
)

// Access configures the connection to a status page that is served over HTTPS, as with --secure-metrics-server.
type Access struct {
	TokenFile string // bearer token; "" uses the credentials of the API server
	CAFile    string // "" uses the root CAs of the system
	Insecure  bool   // accepts any certificate
}

// NewClient returns the client for the status page at address. Credentials are sent over HTTPS only, and never to
// the target of a redirect.
func NewClient(user *rest.Config, address string, access Access) (*http.Client, error) {
	cfg := rest.AnonymousClientConfig(user)
	if u, err := url.Parse(address); err == nil && u.Scheme == "https" {
		if access.TokenFile != "" {
			cfg.BearerTokenFile = access.TokenFile
		} else {
			cfg = rest.CopyConfig(user)
		}
	}
	cfg.Host = address
	cfg.TLSClientConfig = rest.TLSClientConfig{CAFile: access.CAFile, Insecure: access.Insecure}
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("connecting to the status page: %w", err)
	}
	// The transport adds the token to every request, also to another host.
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return client, nil
}

// The time limits of a read, without and with a review of the permissions.
const (
	RequestTimeout = 15 * time.Second
	ReviewTimeout  = 90 * time.Second
)

// maxPage bounds the size of a page.
const maxPage = 8 << 20

// Read reads the status page of a running process. address is that of its HTTP endpoint, with or without the path.
func Read(ctx context.Context, client *http.Client, address string, permissions bool) (page Page, err error) {
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return page, errors.New("invalid URL. Use a URL such as http://127.0.0.1:8080")
	}
	u = u.JoinPath()
	if u.Path == "" || u.Path == "/" {
		u.Path = "/statusz"
	}
	u.RawQuery = "format=json"
	timeout := RequestTimeout
	if permissions {
		u.RawQuery, timeout = "format=json&permissions=1", ReviewTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return page, err
	}
	response, err := client.Do(request)
	if certificate := (*tls.CertificateVerificationError)(nil); errors.As(err, &certificate) {
		return page, fmt.Errorf("%w. Set --status-ca-file, or --status-insecure-skip-tls-verify for a self-signed certificate", certificate)
	} else if err != nil {
		return page, err
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusUnauthorized:
		return page, fmt.Errorf("%s. Set --status-token-file to a file with a bearer token of the cluster", response.Status)
	case http.StatusForbidden:
		return page, fmt.Errorf("%s. Grant the user get on the nonResourceURL %s", response.Status, request.URL.Path)
	default:
		return page, errors.New(response.Status)
	}
	return Decode(response.Body)
}

// Decode reads a page in JSON, which has a plan.
func Decode(r io.Reader) (page Page, err error) {
	if err := json.NewDecoder(io.LimitReader(r, maxPage)).Decode(&page); err != nil || page.Program == "" || page.Plan == nil {
		return page, errors.New("the response is not the status page of storage-controller")
	}
	return page, nil
}
