package webhook

import (
	"crypto"
	"crypto/x509"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// The pair of mode self-signed lives in one Secret: the authority that signs (ca.crt,
// of which the first is the one of ca.key, and after it the one before), and what it
// signed (tls.crt, tls.key). The leader takes one step at a time, each of which is a
// write, and every state in between serves:
//
//	no Secret ──createAuthority──► authority ──publish──► known to API servers ──sign──► pair
//	                                  ▲                                                   │
//	                                  └──── authority past two thirds of its life ────────┤
//	                              sign ◄──── pair past two thirds of its life ◄───────────┘
//
// While a pair of the authority before is served, both authorities are published.

// The names in the Secret, besides those of the pair.
const (
	caName    = "ca.crt"
	caKeyName = "ca.key"
)

// annService marks the Secret as one of this program, with the Service it is for.
const annService = "storage-controller.io/webhook-certificate"

// authority is what is in the Secret. Without cas there is none that is usable.
type authority struct {
	cas  []*x509.Certificate // the one of key first
	key  crypto.Signer
	leaf *x509.Certificate // nil: no pair, or none that works
}

// parseAuthority reads the Secret; what is unusable in it is left out.
func parseAuthority(data map[string][]byte) authority {
	var a authority
	cas := parseCerts(data[caName])
	key, err := parseKey(data[caKeyName])
	if len(cas) == 0 || err != nil || !cas[0].IsCA || !sameKey(cas[0].PublicKey, key.Public()) {
		return a
	}
	a.cas, a.key = cas, key
	leafKey, err := parseKey(data[keyName])
	if leaves := parseCerts(data[certName]); err == nil && len(leaves) > 0 && sameKey(leaves[0].PublicKey, leafKey.Public()) {
		a.leaf = leaves[0]
	}
	return a
}

func sameKey(a, b crypto.PublicKey) bool {
	key, ok := a.(interface{ Equal(crypto.PublicKey) bool })
	return ok && key.Equal(b)
}

// isOurs tells whether the Secret may be written: it is of this program, or empty. The
// keys of somebody else would be lost for ever.
func isOurs(secret *corev1.Secret) bool {
	_, marked := secret.Annotations[annService]
	return marked || len(secret.Data) == 0
}

// upkeepFacts is everything that the next step depends on.
type upkeepFacts struct {
	now   time.Time
	names []string // under which the Service is called
	held  authority
	// serving tells that a valid pair is being served, whatever is in the Secret.
	serving bool
	// bundles is the authorities that each own webhook of the configuration names; none
	// when there is no configuration, of which unknown says that it could not be read.
	bundles [][]*x509.Certificate
	unknown bool
	// published is when the configuration was first seen to name the authority of held in
	// all own webhooks; zero when it does not. After settle all API servers have seen that.
	published time.Time
	settle    time.Duration
}

// upkeepAction is one write.
type upkeepAction int

const (
	doNothing upkeepAction = iota
	doCreateAuthority
	doSign
	doPublish
)

func (a upkeepAction) String() string {
	return [...]string{"Nothing", "CreateAuthority", "Sign", "Publish"}[a]
}

// decideUpkeep names the one next step. It has no side effects.
func decideUpkeep(f upkeepFacts) (_ upkeepAction, reason string) {
	switch {
	case len(f.held.cas) == 0:
		return doCreateAuthority, "NoAuthority"
	case past(f.held.cas[0], f.now):
		return doCreateAuthority, "AuthorityAges"
	}
	unfit := f.leafProblem()
	switch {
	case unfit != "" && !f.serving:
		return doSign, unfit // nobody is served now: it cannot get worse
	case unfit != "" && f.settled():
		return doSign, unfit
	case !f.unknown && slices.ContainsFunc(f.bundles, func(b []*x509.Certificate) bool { return !sameCerts(b, f.wanted(b)) }):
		return doPublish, "NotPublished"
	case unfit != "":
		return doNothing, "Unsettled"
	}
	return doNothing, "UpToDate"
}

// past tells whether c is in the last third of its life.
func past(c *x509.Certificate, now time.Time) bool {
	return now.After(c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) / 3 * 2))
}

// settled tells whether API servers trust what the authority signs.
func (f upkeepFacts) settled() bool {
	return !f.published.IsZero() && !f.now.Before(f.published.Add(f.settle))
}

// leafProblem is why a new pair is needed; "" when it is not.
func (f upkeepFacts) leafProblem() string {
	leaf := f.held.leaf
	switch {
	case leaf == nil:
		return "NoPair"
	case past(leaf, f.now):
		return "PairAges"
	case leaf.CheckSignatureFrom(f.held.cas[0]) != nil:
		return "OtherAuthority"
	case slices.ContainsFunc(f.names, func(name string) bool { return leaf.VerifyHostname(name) != nil }):
		return "OtherNames"
	}
	return ""
}

const (
	// keepOld is how long after a new pair the authorities before it stay published: for
	// replicas that have not seen it.
	keepOld = time.Hour
	// maxBundle bounds what stays: a bundle that somebody else fills must not grow for ever.
	maxBundle = 4
)

// wanted is what a bundle that is now have should be: the authorities of the Secret,
// and while a pair of another may be served those that are there already.
func (f upkeepFacts) wanted(have []*x509.Certificate) []*x509.Certificate {
	want := slices.Clone(f.held.cas)
	if f.leafProblem() == "" && f.now.After(f.held.leaf.NotBefore.Add(backdate+keepOld)) {
		return want
	}
	for _, c := range have {
		if len(want) < maxBundle && f.now.Before(c.NotAfter) && !slices.ContainsFunc(want, c.Equal) {
			want = append(want, c)
		}
	}
	return want
}

func sameCerts(a, b []*x509.Certificate) bool {
	return slices.EqualFunc(a, b, (*x509.Certificate).Equal)
}

// isPublished tells whether all own webhooks of the configuration name the authority.
func (f upkeepFacts) isPublished() bool {
	return !f.unknown && len(f.held.cas) > 0 && !slices.ContainsFunc(f.bundles, func(b []*x509.Certificate) bool {
		return !slices.ContainsFunc(b, f.held.cas[0].Equal)
	})
}

// withNewAuthority is held with a new one before the one it had. Where nothing is served
// it has a new pair as well; else that comes when the new authority is published.
func (f upkeepFacts) withNewAuthority() (map[string][]byte, error) {
	ca, key, err := newCA(f.now, f.names[len(f.names)-1]+" webhook authority")
	if err != nil {
		return nil, err
	}
	text, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	next := f
	next.held = authority{cas: []*x509.Certificate{ca}, key: key}
	if len(f.held.cas) > 0 && f.now.Before(f.held.cas[0].NotAfter) {
		next.held.cas = append(next.held.cas, f.held.cas[0])
	}
	data := map[string][]byte{caName: encodeCerts(next.held.cas...), caKeyName: text}
	if f.serving {
		return data, nil
	}
	pair, err := next.withNewPair()
	if err != nil {
		return nil, err
	}
	for name, value := range pair {
		data[name] = value
	}
	return data, nil
}

// withNewPair is the pair that the authority of held signs now. The authority before
// stays until one more pair was signed: all replicas serve another one by then.
func (f upkeepFacts) withNewPair() (map[string][]byte, error) {
	leaf, key, err := newLeaf(f.now, f.held.cas[0], f.held.key, f.names)
	if err != nil {
		return nil, err
	}
	text, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	cas := f.held.cas
	if f.held.leaf != nil && f.held.leaf.CheckSignatureFrom(cas[0]) == nil {
		cas = cas[:1]
	}
	return map[string][]byte{caName: encodeCerts(cas...), certName: encodeCerts(leaf), keyName: text}, nil
}
