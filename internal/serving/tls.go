// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package serving

import (
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// TLS is what the HTTPS servers of the process accept from clients, in the words of the flags of Kubernetes components.
type TLS struct {
	MinVersion   string   // such as VersionTLS12, which is also the meaning of ""
	CipherSuites []string // names of IANA; empty: those that Go prefers. They have no effect on TLS 1.3
}

var versions = map[string]uint16{
	"": tls.VersionTLS12, "VersionTLS10": tls.VersionTLS10, "VersionTLS11": tls.VersionTLS11, "VersionTLS12": tls.VersionTLS12,
	"VersionTLS13": tls.VersionTLS13,
}

// GetCertificate returns the serving certificate for a client.
type GetCertificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)

// Config returns the configuration of a server, or an error that names the flags.
func (t TLS) Config(get GetCertificate) (*tls.Config, error) {
	var errs []error
	version, known := versions[t.MinVersion]
	if !known {
		errs = append(errs, fmt.Errorf("--tls-min-version: must be one of %s, got %q",
			strings.Join(slices.Sorted(maps.Keys(versions))[1:], ", "), t.MinVersion))
	}
	c := &tls.Config{MinVersion: version, GetCertificate: get}
	all := append(tls.CipherSuites(), tls.InsecureCipherSuites()...)
	for _, name := range t.CipherSuites {
		i := slices.IndexFunc(all, func(s *tls.CipherSuite) bool { return s.Name == name })
		if i < 0 {
			errs = append(errs, fmt.Errorf("--tls-cipher-suites: unknown cipher suite %q: must be a name of IANA, such as %s", name,
				all[0].Name))
			continue
		}
		c.CipherSuites = append(c.CipherSuites, all[i].ID)
	}
	// RFC 9113, section 9.2.2. The server of Go does not start without one of them.
	forHTTP2 := []uint16{tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256}
	isForHTTP2 := func(id uint16) bool { return slices.Contains(forHTTP2, id) }
	if len(errs) == 0 && len(c.CipherSuites) > 0 && version < tls.VersionTLS13 && !slices.ContainsFunc(c.CipherSuites, isForHTTP2) {
		errs = append(errs, fmt.Errorf("--tls-cipher-suites: HTTP/2 requires %s or %s", tls.CipherSuiteName(forHTTP2[0]),
			tls.CipherSuiteName(forHTTP2[1])))
	}
	return c, errors.Join(errs...)
}
