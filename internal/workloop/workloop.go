package workloop

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
)

// ErrDrain as the cause of the end of the context given to [Loop.Run] lets
// running items finish, for [Config.GracePeriod] at most. Any other cause, a lost
// Lease among them, ends their contexts at once.
var ErrDrain = errors.New("shutting down")

// Sync brings the object behind key one step further or to its end.
//
// An error means: again, after the back-off of this key. A time that is not
// zero means: look again then. Neither means: done until the next event.
type Sync[K comparable] func(ctx context.Context, key K) (next time.Time, err error)

// Config describes a loop. Name and the two retry intervals are required.
type Config struct {
	// Name is the value of the label "name" of the workqueue metrics.
	Name string
	// RetryStart is the delay after the first failure of a key. It doubles
	// with each further failure up to RetryMax.
	RetryStart, RetryMax time.Duration
	// Jitter is by which fraction of itself a delay is lengthened at most, at random, so
	// that what failed together is not tried together again. Zero: not at all.
	Jitter float64
	// WaitReady returns once work may go on, or with the error of ctx. It is asked
	// before every item; nil means always. A driver that is away holds its
	// workers here instead of failing every item.
	WaitReady func(ctx context.Context) error
	// GracePeriod bounds how long running items may go on after [ErrDrain]. Zero
	// means that they are cancelled at once.
	GracePeriod time.Duration
}

// Loop is a queue of keys and what is known of the keys that failed. Keys are
// values; any number of Adds of one key while it waits are one item, and one
// key is never worked on twice at the same time.
type Loop[K comparable] struct {
	cfg     Config
	metrics *Metrics
	sync    Sync[K]
	queue   workqueue.TypedDelayingInterface[K]

	mu      sync.Mutex
	known   map[K]*state // keys that are being worked on, or whose last attempt failed
	history history
}

// state is what is remembered of a key while it is worked on and until it succeeds.
type state struct {
	failures  int       // in a row
	notBefore time.Time // of the next attempt; zero: none has failed yet
	urgent    bool      // an event came since the last attempt began: do not wait for notBefore
	running   bool
	since     time.Time // when the running attempt began
	lastError string
}

// New makes a loop. It starts nothing; events may be added at once.
func New[K comparable](cfg Config, metrics *Metrics, sync Sync[K]) *Loop[K] {
	return newLoop(cfg, metrics, sync, workqueue.DefaultQueue[K]())
}

func newLoop[K comparable](cfg Config, metrics *Metrics, sync Sync[K], order workqueue.Queue[K]) *Loop[K] {
	provider := metrics.provider()
	return &Loop[K]{
		cfg: cfg, metrics: metrics, sync: sync,
		queue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[K]{
			Name: cfg.Name, MetricsProvider: provider,
			Queue: workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[K]{Name: cfg.Name, MetricsProvider: provider, Queue: order}),
		}),
		known: map[K]*state{},
	}
}

// Add queues key now. A running back-off of key is cut short, but its failures
// still count, so that the next delay is the longer one. An Add while key is
// worked on leads to another attempt right after, also when this one fails.
func (l *Loop[K]) Add(key K) {
	l.mu.Lock()
	if st, known := l.known[key]; known {
		st.urgent = true
	}
	l.mu.Unlock()
	l.queue.Add(key)
}

// Resync queues key unless it waits in back-off: a periodic look at everything
// must not turn into a burst of calls that have just failed. A key that is worked on is
// looked at again, but not before its back-off if that fails.
func (l *Loop[K]) Resync(key K) {
	l.mu.Lock()
	st, known := l.known[key]
	waits := known && !st.running
	l.mu.Unlock()
	if !waits {
		l.queue.Add(key)
	}
}

// Forget drops what is known of the failures of key, because its object is gone:
// another object of that name starts with the first delay again.
func (l *Loop[K]) Forget(key K) {
	l.mu.Lock()
	delete(l.known, key)
	l.mu.Unlock()
}

// Processing tells whether key is worked on just now.
func (l *Loop[K]) Processing(key K) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	st, known := l.known[key]
	return known && st.running
}

// Stop ends a loop that will not run. After [Loop.Run] it does nothing.
func (l *Loop[K]) Stop() { l.queue.ShutDown() }

// Len is the number of keys that wait for a worker, those in back-off excluded.
func (l *Loop[K]) Len() int { return l.queue.Len() }

// Run works until ctx ends and returns after the last worker has stopped. How
// running items end depends on the cause, see [ErrDrain]. A loop runs once.
func (l *Loop[K]) Run(ctx context.Context, workers int) {
	defer l.metrics.running.begin(l.cfg.Name, l.Status)()
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	drained := context.AfterFunc(ctx, func() {
		l.queue.ShutDown()
		cause := context.Cause(ctx)
		if !errors.Is(cause, ErrDrain) || l.cfg.GracePeriod <= 0 {
			cancel(cause)
			return
		}
		// The timer outlives this call at most until Run returns: cancelling twice is harmless.
		time.AfterFunc(l.cfg.GracePeriod, func() { cancel(fmt.Errorf("after %v of grace: %w", l.cfg.GracePeriod, cause)) })
	})
	defer drained()

	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for l.next(ctx, work) {
			}
		})
	}
	wg.Wait()
}

// next works on one item; it returns false when there will be no more.
func (l *Loop[K]) next(ctx, work context.Context) bool {
	key, shutdown := l.queue.Get()
	if shutdown {
		return false
	}
	defer l.queue.Done(key)
	if ctx.Err() != nil {
		return false // what is still queued belongs to whoever leads next
	}
	if l.cfg.WaitReady != nil && l.cfg.WaitReady(ctx) != nil {
		return false // only the end of ctx ends the wait
	}
	if wait := l.begin(key); wait > 0 {
		l.queue.AddAfter(key, wait)
		return true
	}
	l.process(work, key)
	return true
}

// begin marks key as worked on, or says how much of its back-off is left. A
// stale timer of an earlier, shorter delay ends here.
func (l *Loop[K]) begin(key K) (wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	st, known := l.known[key]
	if !known {
		l.known[key] = &state{running: true, since: time.Now()}
		return 0
	}
	if !st.urgent {
		if wait := time.Until(st.notBefore); wait > 0 {
			return wait
		}
	}
	st.urgent, st.running, st.since = false, true, time.Now()
	return 0
}

func (l *Loop[K]) process(ctx context.Context, key K) {
	log := klog.FromContext(ctx).WithValues("loop", l.cfg.Name, "key", key)
	start := time.Now()
	next, err := l.syncRecovering(klog.NewContext(ctx, log), key)
	busy := time.Since(start)
	if err != nil || busy >= minRecordedDuration {
		l.mu.Lock()
		l.history.add(Attempt{fmt.Sprint(key), start.Add(busy), busy, errorText(err)})
		l.mu.Unlock()
	}
	if err != nil {
		delay := l.requeueFailed(key, err)
		log.V(1).Info("Sync failed", "busy", busy, "retryIn", delay, "err", err)
		return
	}
	l.Forget(key)
	if !next.IsZero() {
		l.queue.AddAfter(key, time.Until(next))
	}
	log.V(1).Info("Synced", "busy", busy)
}

// syncRecovering turns a panic of sync into an error: it costs one item one attempt,
// never the process or another loop.
func (l *Loop[K]) syncRecovering(ctx context.Context, key K) (next time.Time, err error) {
	defer func() {
		if p := recover(); p != nil {
			l.metrics.panics.WithLabelValues(l.cfg.Name).Inc()
			err = fmt.Errorf("panic: %v", p)
			klog.FromContext(ctx).Error(err, "Recovered a panic", "stack", string(debug.Stack()))
		}
	}()
	return l.sync(ctx, key)
}

// requeueFailed counts a failure of key and queues its next attempt.
func (l *Loop[K]) requeueFailed(key K, err error) (delay time.Duration) {
	l.mu.Lock()
	st := l.known[key]
	if st == nil { // forgotten while it was worked on
		st = &state{}
		l.known[key] = st
	}
	delay = backoff(l.cfg.RetryStart, l.cfg.RetryMax, st.failures)
	if l.cfg.Jitter > 0 {
		delay = wait.Jitter(delay, l.cfg.Jitter)
	}
	st.failures++
	st.running = false
	st.notBefore, st.lastError = time.Now().Add(delay), errorText(err)
	l.mu.Unlock()
	l.metrics.retries.WithLabelValues(l.cfg.Name).Inc()
	l.queue.AddAfter(key, delay)
	return delay
}

// backoff is start doubled failures times, max at most.
func backoff(start, max time.Duration, failures int) time.Duration {
	delay := start
	for range failures {
		if delay >= max/2 {
			return max
		}
		delay *= 2
	}
	return min(delay, max)
}
