// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package workloop

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/pressure"
)

// Sync reconciles the object of key. After an error, key is requeued with back-off. A non-zero
// next requeues key at that time. After [Waiting], it is requeued at that time only.
type Sync[K comparable] func(ctx context.Context, key K) (next time.Time, err error)

// Waiting is the error of a sync of an object that still lacks something, and for which an event or the time that sync returns continues
// the work: there is no back-off. [Loop.Status] shows the key as failing, as long as its syncs return errors.
type Waiting struct {
	Cause error // the failure of this attempt; nil: it made none
}

// Error returns the text of the cause.
func (w Waiting) Error() string { return fmt.Sprintf("waiting after: %v", w.Cause) }

// Config configures a loop. Name and the two retry intervals are required.
type Config struct {
	// Name is the label "name" of the workqueue metrics.
	Name string
	// RetryStart is the delay after the first failure of a key. The delay doubles with each
	// failure in a row, up to RetryMax.
	RetryStart, RetryMax time.Duration
	// Jitter lengthens each delay by a part of up to this fraction that depends on the key, so that
	// keys that failed at the same time are not retried at the same time.
	Jitter float64
	// WaitReady, if set, is called before every key. It blocks while the driver is unavailable,
	// so that calls do not fail for every key, and returns an error only at the end of ctx.
	WaitReady func(ctx context.Context) error
	// GracePeriod bounds running calls of sync after [ErrDrain]. Zero cancels them immediately.
	GracePeriod time.Duration
}

// Loop is a queue of keys with workers. Adding a waiting key again has no effect, and two workers
// never process the same key.
type Loop[K comparable] struct {
	cfg     Config
	metrics *Metrics
	sync    Sync[K]
	queue   workqueue.TypedDelayingInterface[K]
	fair    *fairQueue[K] // nil unless the loop is that of [NewFair]
	held    *heldQueue[K] // nil without [Metrics.Enqueue]
	stage   func(K) string

	mu      sync.Mutex
	states  map[K]*state // of keys that are being processed, or whose last attempt failed
	history history
}

// state describes a key from its first attempt until an attempt succeeds.
type state struct {
	attempts    int       // that failed in a row
	failures    int       // those among them that count for the back-off
	notBefore   time.Time // end of the back-off; zero without one
	next        time.Time // of the next attempt, zero if only an event causes one
	skipBackoff bool      // an event arrived after the last attempt started
	running     bool
	since       time.Time // start of the running attempt
	lastError   string
	logged      []uint64 // hashes of the errors that were logged, at most maxLogged
}

// maxLogged is the number of errors of a key that are logged once. After it, the oldest may be logged again.
const maxLogged = 16

// logs reports whether text is to be logged for the key, and records it.
func (s *state) logs(text string) bool {
	h := fnv.New64a()
	h.Write([]byte(text))
	if slices.Contains(s.logged, h.Sum64()) {
		return false
	}
	if len(s.logged) == maxLogged {
		s.logged = slices.Delete(s.logged, 0, 1)
	}
	s.logged = append(s.logged, h.Sum64())
	return true
}

// New returns a loop that processes keys in the order of their arrival. Keys may be added before
// [Loop.Run].
func New[K comparable](cfg Config, metrics *Metrics, sync Sync[K]) *Loop[K] {
	return newLoop(cfg, metrics, sync, workqueue.DefaultQueue[K]())
}

func newLoop[K comparable](cfg Config, metrics *Metrics, sync Sync[K], order workqueue.Queue[K]) *Loop[K] {
	provider := metrics.provider()
	queue := workqueue.TypedInterface[K](
		workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[K]{Name: cfg.Name, MetricsProvider: provider, Queue: order}))
	var held *heldQueue[K]
	if metrics.Enqueue != nil {
		held = &heldQueue[K]{TypedInterface: queue, loop: cfg.Name, enqueue: metrics.Enqueue}
		queue = held
	}
	return &Loop[K]{
		cfg: cfg, metrics: metrics, sync: sync, held: held,
		queue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[K]{
			Name: cfg.Name, MetricsProvider: provider, Queue: queue,
		}),
		stage:  func(K) string { return "" },
		states: map[K]*state{},
	}
}

// heldQueue is a queue of [Metrics.Enqueue].
type heldQueue[K comparable] struct {
	workqueue.TypedInterface[K]
	loop    string
	enqueue func(loop string, key any, add func())

	mu      sync.Mutex
	running bool
	early   []K // that were added before
}

// Add has the key added later, and not before the loop runs: several workers would begin at the same time.
func (q *heldQueue[K]) Add(key K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.running {
		q.early = append(q.early, key)
		return
	}
	q.enqueue(q.loop, key, func() { q.TypedInterface.Add(key) })
}

// run is called when the workers have started.
func (q *heldQueue[K]) run() {
	q.mu.Lock()
	early := q.early
	q.running, q.early = true, nil
	q.mu.Unlock()
	for _, key := range early {
		q.Add(key)
	}
}

// Add enqueues key and ends its back-off. Previous failures still count for the next delay. If key
// is being processed, it is processed again immediately afterwards, even after a failure.
func (l *Loop[K]) Add(key K) {
	l.mu.Lock()
	if st, ok := l.states[key]; ok {
		st.skipBackoff = true
	}
	l.mu.Unlock()
	l.queue.Add(key)
}

// Resync enqueues key unless it is in back-off, so that a periodic resync does not retry all
// failed calls at once. A key that is being processed is processed again, after its back-off if
// the current attempt fails.
func (l *Loop[K]) Resync(key K) {
	l.mu.Lock()
	st, ok := l.states[key]
	inBackoff := ok && !st.running && !st.notBefore.IsZero()
	l.mu.Unlock()
	if !inBackoff {
		l.queue.Add(key)
	}
}

// Forget resets the back-off of key. Call it when the object of key was deleted, or requests something else. A running attempt
// counts as the first one, and [Loop.Add] still has its effect.
func (l *Loop[K]) Forget(key K) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if st, ok := l.states[key]; ok && st.running {
		*st = state{running: true, since: st.since, skipBackoff: st.skipBackoff}
		return
	}
	delete(l.states, key)
}

// Processing reports whether a worker is processing key.
func (l *Loop[K]) Processing(key K) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	st, ok := l.states[key]
	return ok && st.running
}

// Stop shuts the queue down and drops its keys. The next leader fills its own queue. Call it after Run, or instead of Run.
func (l *Loop[K]) Stop() {
	l.queue.ShutDown()
	l.metrics.reset(l.cfg.Name)
}

// Len returns the number of keys that wait for a worker, excluding those in back-off.
func (l *Loop[K]) Len() int {
	if l.fair != nil {
		return l.fair.total()
	}
	return l.queue.Len()
}

// Run processes keys until ctx ends and returns after the last worker has stopped. See [ErrDrain]
// for running calls of sync. Run must be called once.
func (l *Loop[K]) Run(ctx context.Context, workers int) {
	defer l.metrics.loops.register(l.cfg.Name, l.Status)()
	if l.fair != nil {
		l.fair.setWorkers(workers)
	}
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	held := election.Held(ctx)
	defer context.AfterFunc(ctx, func() {
		l.queue.ShutDown()
		cause := context.Cause(ctx)
		if errors.Is(cause, ErrDrain) && l.cfg.GracePeriod > 0 {
			select {
			case <-work.Done(): // all workers have stopped
			case <-held.Done():
				cause = context.Cause(held)
			case <-time.After(l.cfg.GracePeriod):
				cause = fmt.Errorf("grace period of %v exceeded: %w", l.cfg.GracePeriod, cause)
			}
		}
		cancel(cause)
	})()

	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for l.processNext(ctx, work) {
			}
		})
	}
	if l.held != nil {
		l.held.run()
	}
	wg.Wait()
}

// processNext waits for a key and processes it with the context work. It returns false after the
// end of ctx.
func (l *Loop[K]) processNext(ctx, work context.Context) bool {
	key, shutdown := l.queue.Get()
	if shutdown {
		return false
	}
	defer l.queue.Done(key)
	if l.fair != nil {
		defer l.fair.release(key)
	}
	if ctx.Err() != nil {
		return false // the next leader processes the keys that are still queued
	}
	if l.cfg.WaitReady != nil && l.cfg.WaitReady(ctx) != nil {
		return false // ctx ended
	}
	if wait := l.begin(key); wait > 0 {
		l.queue.AddAfter(key, wait)
		return true
	}
	l.process(ctx, work, key)
	return true
}

// begin marks key as being processed, or returns the rest of its back-off. The timer of an earlier
// delay may enqueue key before that.
func (l *Loop[K]) begin(key K) (wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	st, ok := l.states[key]
	if !ok {
		st = &state{}
		l.states[key] = st
	}
	if wait := time.Until(st.notBefore); wait > 0 && !st.skipBackoff {
		return wait
	}
	st.skipBackoff, st.running, st.since = false, true, time.Now()
	return 0
}

// process processes key with the context work. At the end of term, an attempt that waits for other calls of the driver fails.
func (l *Loop[K]) process(term, work context.Context, key K) {
	log := klog.FromContext(work).WithValues("loop", l.cfg.Name, "key", key)
	start := time.Now()
	ctx, leave := pressure.Attempt(work, term)
	defer leave()
	var next time.Time
	err := election.Reread(func() (err error) {
		next, err = l.syncRecovering(klog.NewContext(ctx, log), key)
		return err
	})
	duration := time.Since(start)
	var waiting Waiting
	waits := errors.As(err, &waiting)
	if waits {
		err = waiting.Cause
	}
	if errors.Is(err, intent.ErrBug) {
		l.metrics.bugs.WithLabelValues(l.cfg.Name).Inc()
	}
	if err != nil || duration >= minRecordedDuration {
		l.mu.Lock()
		l.history.add(Attempt{fmt.Sprint(key), start.Add(duration), duration, errorText(err)})
		l.mu.Unlock()
	}
	log = log.WithValues("stage", l.stage(key), "duration", duration)
	switch {
	case waits:
		logFailure(ctx, log.WithValues("until", next), "Sync waits", err, l.waits(key, next, err))
	case err != nil:
		delay, first := l.requeueFailed(key, err)
		logFailure(ctx, log.WithValues("retryIn", delay), "Sync failed", err, first)
		return
	default:
		l.drop(key)
		log.V(1).Info("Synced")
	}
	if !next.IsZero() {
		l.queue.AddAfter(key, time.Until(next))
	}
}

// logFailure logs err, which may be nil. first is false if this error of the key was logged before. A bug is logged each time.
func logFailure(ctx context.Context, log klog.Logger, message string, err error, first bool) {
	if errors.Is(err, intent.ErrBug) {
		log.Error(err, message)
		return
	}
	if first && !passes(ctx, err) {
		log.Error(errors.New(shortened(err.Error(), maxLoggedText)), message)
		return
	}
	log.V(1).Info(message, "err", err)
}

// passes reports whether the cause of err is expected to pass: the term ends, another client has changed the object, or the state
// was read too long ago.
func passes(ctx context.Context, err error) bool {
	return ctx.Err() != nil || errors.Is(err, ErrDrain) || errors.Is(err, election.ErrLost) || errors.Is(err, election.ErrOldRead) ||
		apierrors.IsConflict(err)
}

// syncRecovering calls sync and returns a panic as an error, which affects no other key.
func (l *Loop[K]) syncRecovering(ctx context.Context, key K) (next time.Time, err error) {
	defer func() {
		if p := recover(); p != nil {
			l.metrics.panics.WithLabelValues(l.cfg.Name).Inc()
			err = fmt.Errorf("panic: %v", p)
			klog.FromContext(ctx).Error(err, "Recovered from panic", "stack", string(debug.Stack()))
		}
	}()
	return l.sync(ctx, key)
}

// drop ends the attempts for key.
func (l *Loop[K]) drop(key K) {
	l.mu.Lock()
	delete(l.states, key)
	l.mu.Unlock()
}

// waits ends the back-off of key, and keeps what [Loop.Status] shows of its failures. cause is the last of them, nil if this attempt
// made none. first is false if it was logged before, or is nil.
func (l *Loop[K]) waits(key K, next time.Time, cause error) (first bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := l.states[key]
	switch {
	case cause == nil && (st == nil || st.attempts == 0): // nothing to show
		delete(l.states, key)
		return false
	case st == nil: // Forget was called during the attempt
		st = &state{}
		l.states[key] = st
	}
	st.running, st.failures, st.notBefore, st.next = false, 0, time.Time{}, next
	if cause != nil {
		st.attempts++
		st.lastError, first = errorText(cause), st.logs(cause.Error())
	}
	return first
}

// requeueFailed counts a failure of key and enqueues it after the back-off. first is false if this error of key was logged before.
func (l *Loop[K]) requeueFailed(key K, err error) (delay time.Duration, first bool) {
	l.mu.Lock()
	st := l.states[key]
	if st == nil { // Forget was called during the attempt
		st = &state{}
		l.states[key] = st
	}
	delay = Backoff(l.cfg.RetryStart, l.cfg.RetryMax, st.failures)
	if l.cfg.Jitter > 0 {
		delay += time.Duration(float64(delay) * l.cfg.Jitter * Spread(key))
	}
	st.failures++
	st.attempts++
	st.running = false
	st.notBefore, st.lastError, first = time.Now().Add(delay), errorText(err), st.logs(err.Error())
	st.next = st.notBefore
	l.mu.Unlock()
	l.metrics.retries.WithLabelValues(l.cfg.Name).Inc()
	l.queue.AddAfter(key, delay)
	return delay, first
}

// Backoff doubles start for each failure, up to max.
func Backoff(start, max time.Duration, failures int) time.Duration {
	delay := start
	for range failures {
		if delay >= max/2 {
			return max
		}
		delay *= 2
	}
	return min(delay, max)
}

// Spread returns a number from 0 to 1 that depends on key. It spreads what would be done for many keys at the same time.
func Spread[K comparable](key K) float64 {
	h := fnv.New64a()
	fmt.Fprint(h, key)
	return float64(h.Sum64()) / math.MaxUint64
}

// Every calls f after each period, until ctx ends; never if period is zero.
func Every(ctx context.Context, period time.Duration, f func()) {
	if period == 0 {
		return
	}
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f()
		}
	}
}
