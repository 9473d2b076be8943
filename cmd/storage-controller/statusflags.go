// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/tools/statusz"
)

// statusFlags are the flags of the status page of a running process.
type statusFlags struct {
	url    string // "": none
	access statusz.Access
}

func (s *statusFlags) add(fs *pflag.FlagSet) {
	fs.StringVar(&s.url, "status-url", "", "URL of the HTTP endpoint of a running process (its --http-endpoint), "+
		"such as http://localhost:8080 after kubectl port-forward; empty reads no status page")
	fs.StringVar(&s.access.TokenFile, "status-token-file", "", "file with the bearer token for an https --status-url; "+
		"empty means the credentials of the kubeconfig or ServiceAccount")
	fs.StringVar(&s.access.CAFile, "status-ca-file", "",
		"file with the CA certificates for an https --status-url; empty means those of the system")
	fs.BoolVar(&s.access.Insecure, "status-insecure-skip-tls-verify", false,
		"do not verify the certificate of an https --status-url, such as the self-signed one of --secure-metrics-server")
}

var statusURL = regexp.MustCompile(`^https?://[^/]`)

// validate returns an error for a flag that is wrong, or without effect.
func (s statusFlags) validate() error {
	switch {
	case s.url != "" && !statusURL.MatchString(s.url):
		return fmt.Errorf("--status-url: must be a URL such as http://localhost:8080, got %q", s.url)
	case s.access != statusz.Access{} && !strings.HasPrefix(s.url, "https://"):
		return errors.New("--status-token-file, --status-ca-file, --status-insecure-skip-tls-verify: require an https --status-url")
	}
	return nil
}
