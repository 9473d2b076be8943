package webhook

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

// keeper holds the pair that is served. A worse one never takes the place of a good one.
type keeper struct {
	now     func() time.Time
	reloads *prometheus.CounterVec
	current atomic.Pointer[tls.Certificate]

	mu      sync.Mutex
	tried   [sha256.Size]byte // what was found last, taken or not
	problem error             // why that was not taken; nil when it was
}

// offer is told what was found, as often as one likes. It reports what is new: that a
// pair was taken, or why it was not.
func (k *keeper) offer(cert, key []byte) (taken bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	tried := sha256.Sum256(append(append([]byte{}, cert...), key...))
	known := tried == k.tried
	if known && k.problem == nil {
		return false, nil
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err == nil {
		err = validAt(&pair, k.now())
	}
	k.tried, k.problem = tried, err
	if err == nil {
		k.current.Store(&pair)
	}
	if known && err != nil {
		return false, nil // it was told of before
	}
	k.reloads.WithLabelValues(result(err)).Inc()
	return err == nil, err
}

// missing is told that nothing was found, and why. It reports whether that is new.
func (k *keeper) missing(why error) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	known := k.problem != nil && k.problem.Error() == why.Error()
	k.tried, k.problem = [sha256.Size]byte{}, why
	return !known
}

// get is the callback of TLS.
func (k *keeper) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if pair := k.current.Load(); pair != nil {
		return pair, nil
	}
	return nil, errors.New("there is no certificate yet")
}

// ready is nil while the pair that is served is valid.
func (k *keeper) ready() error {
	pair := k.current.Load()
	if pair != nil {
		return validAt(pair, k.now())
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.problem != nil {
		return fmt.Errorf("no certificate to serve: %w", k.problem)
	}
	return errors.New("no certificate to serve was found yet")
}

// left is how long the pair that is served is valid.
func (k *keeper) left() time.Duration {
	if pair := k.current.Load(); pair != nil {
		return pair.Leaf.NotAfter.Sub(k.now())
	}
	return 0
}

func validAt(pair *tls.Certificate, now time.Time) error {
	switch leaf := pair.Leaf; {
	case now.Before(leaf.NotBefore):
		return fmt.Errorf("the certificate is not valid before %s: check the clocks, or wait", leaf.NotBefore.UTC().Format(time.RFC3339))
	case now.After(leaf.NotAfter):
		return fmt.Errorf("the certificate has expired at %s: renew it", leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return nil
}

// tell logs what offer reported about what was found in a place.
func tell(ctx context.Context, where string, taken bool, err error) {
	log := klog.FromContext(ctx)
	switch {
	case err != nil:
		log.Error(err, "A serving certificate was not taken, the one before stays", "source", where)
	case taken:
		log.Info("Serving certificate loaded", "source", where)
	}
}

// warnOfExpiry says so when the certificate that is served is about to expire.
func (s *Server) warnOfExpiry(ctx context.Context) {
	const early, again = 7 * 24 * time.Hour, 6 * time.Hour
	for pause := time.Minute; ; pause = again { // the first one has to be loaded before
		if wait(ctx, pause); ctx.Err() != nil {
			return
		}
		if left := s.keeper.left(); s.keeper.current.Load() != nil && left < early {
			klog.FromContext(ctx).Info("The serving certificate of the webhooks expires soon and nothing has renewed it", "left", left.Round(time.Minute))
		}
	}
}
