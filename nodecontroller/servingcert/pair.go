package servingcert

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/client-go/util/cert"
)

// pair is a self-signed serving certificate, its key and the authority that signed it.
type pair struct {
	cert, key []byte // in PEM
	served    tls.Certificate
	authority *x509.Certificate
}

// backdate is how long before its generation a pair becomes valid, for late clocks.
const backdate = time.Hour

// generate returns a pair for hosts. The key of its authority is discarded, so that nothing that
// signs is stored.
func generate(hosts []string, lifetime time.Duration) (*pair, error) {
	certs, key, err := cert.GenerateSelfSignedCertKeyWithOptions(cert.SelfSignedCertKeyOptions{
		Host: hosts[0], AlternateDNS: hosts[1:], MaxAge: lifetime,
	})
	if err != nil {
		return nil, err
	}
	chain := parseCerts(certs) // the certificate, then its authority
	if p := parsePair(certs, key, encodeCerts(chain[1:]...)); p != nil {
		return p, nil
	}
	return nil, errors.New("the generated pair is unusable")
}

// parsePair returns nil if the pair is unusable, or not signed by the authority.
func parsePair(certs, key, authority []byte) *pair {
	served, err := tls.X509KeyPair(certs, key)
	authorities := parseCerts(authority)
	if err != nil || len(authorities) == 0 || served.Leaf.CheckSignatureFrom(authorities[0]) != nil {
		return nil
	}
	return &pair{certs, key, served, authorities[0]}
}

// valid reports whether clients accept p now.
func (p *pair) valid(now time.Time) bool { return p != nil && validAt(&p.served, now) == nil }

// fresh reports whether p is valid for hosts and at least a third of its lifetime is left.
func (p *pair) fresh(hosts []string, now time.Time) bool {
	if !p.valid(now) {
		return false
	}
	leaf := p.served.Leaf
	third := leaf.NotAfter.Sub(leaf.NotBefore) / 3
	return leaf.NotAfter.Sub(now) >= third &&
		!slices.ContainsFunc(hosts, func(host string) bool { return leaf.VerifyHostname(host) != nil })
}

// age returns how long ago p was generated.
func (p *pair) age(now time.Time) time.Duration {
	return now.Sub(p.served.Leaf.NotBefore.Add(backdate))
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

// parseCerts returns the certificates of a PEM bundle and skips everything else.
func parseCerts(bundle []byte) (certs []*x509.Certificate) {
	for {
		var block *pem.Block
		if block, bundle = pem.Decode(bundle); block == nil {
			return certs
		}
		if c, err := x509.ParseCertificate(block.Bytes); err == nil && block.Type == cert.CertificateBlockType {
			certs = append(certs, c)
		}
	}
}

// encodeCerts returns certs as PEM.
func encodeCerts(certs ...*x509.Certificate) (bundle []byte) {
	for _, c := range certs {
		bundle = append(bundle, pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: c.Raw})...)
	}
	return bundle
}

// maxBundle bounds the authorities that stay in a bundle: exits during a renewal must not let it grow.
const maxBundle = 8

// bundleWith returns the required authorities and, without prune, the other valid ones of have.
// It reports false if have is up to date, in any order: two leaders must not sort it in turn.
func bundleWith(have, required []*x509.Certificate, prune bool, now time.Time) ([]*x509.Certificate, bool) {
	want := slices.Clone(required)
	for _, c := range have {
		if !prune && now.Before(c.NotAfter) && len(want) < maxBundle && !slices.ContainsFunc(want, c.Equal) {
			want = append(want, c)
		}
	}
	missing := func(c *x509.Certificate) bool { return !slices.ContainsFunc(have, c.Equal) }
	return want, len(have) != len(want) || slices.ContainsFunc(want, missing)
}
