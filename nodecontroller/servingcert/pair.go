// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package servingcert

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
	"time"

	"k8s.io/client-go/util/cert"
)

// generate returns a serving certificate for hosts followed by its authority, and its key, in PEM. It is valid
// from an hour ago, for late clocks. The key of the authority is discarded, so that nothing that signs is stored.
func generate(hosts []string, lifetime time.Duration) (certs, key []byte, err error) {
	return cert.GenerateSelfSignedCertKeyWithOptions(cert.SelfSignedCertKeyOptions{
		Host: hosts[0], AlternateDNS: hosts[1:], MaxAge: lifetime,
	})
}

// parsePair returns a self-signed pair, nil if it is unusable or not followed by its authority.
func parsePair(certs, key []byte) *tls.Certificate {
	pair, err := tls.X509KeyPair(certs, key)
	if ca := authority(&pair); err != nil || ca == nil || pair.Leaf.CheckSignatureFrom(ca) != nil {
		return nil
	}
	return &pair
}

// authority returns the certificate that follows a serving certificate, nil if there is none.
func authority(pair *tls.Certificate) *x509.Certificate {
	if pair == nil || len(pair.Certificate) < 2 {
		return nil
	}
	ca, _ := x509.ParseCertificate(pair.Certificate[1]) // nil after an error
	return ca
}

// validAt returns an error unless clients accept pair at now.
func validAt(pair *tls.Certificate, now time.Time) error {
	switch leaf := pair.Leaf; {
	case now.Before(leaf.NotBefore):
		return fmt.Errorf("the certificate is not valid before %s. Check the clocks", leaf.NotBefore.UTC().Format(time.RFC3339))
	case now.After(leaf.NotAfter):
		return fmt.Errorf("the certificate expired at %s. Renew it", leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return nil
}

// fresh reports whether pair is valid for hosts and at least a third of its lifetime is left.
func fresh(pair *tls.Certificate, hosts []string, now time.Time) bool {
	if pair == nil || validAt(pair, now) != nil {
		return false
	}
	leaf := pair.Leaf
	return leaf.NotAfter.Sub(now) >= leaf.NotAfter.Sub(leaf.NotBefore)/3 &&
		!slices.ContainsFunc(hosts, func(host string) bool { return leaf.VerifyHostname(host) != nil })
}

// maxBundle bounds the authorities of a bundle: two programs that renew the same Secret must not let it grow.
const maxBundle = 8

// bundleWith returns the bundle with the authorities of pairs, before the other valid ones of bundle. It returns
// nil if bundle has them, and reports whether bundle has any authority.
func bundleWith(bundle []byte, now time.Time, pairs ...*tls.Certificate) (next []byte, trusts bool, err error) {
	have, _ := cert.ParseCertsPEM(bundle) // none after an error
	var want []*x509.Certificate
	for _, pair := range pairs {
		if ca := authority(pair); ca != nil && !slices.ContainsFunc(want, ca.Equal) {
			want = append(want, ca)
		}
	}
	if !slices.ContainsFunc(want, func(ca *x509.Certificate) bool { return !slices.ContainsFunc(have, ca.Equal) }) {
		return nil, len(have) > 0, nil
	}
	for _, ca := range have {
		if now.Before(ca.NotAfter) && len(want) < maxBundle && !slices.ContainsFunc(want, ca.Equal) {
			want = append(want, ca)
		}
	}
	next, err = cert.EncodeCertificates(want...)
	return next, len(have) > 0, err
}
