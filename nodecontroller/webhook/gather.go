package webhook

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// mutatePod gathers and asks decidePod until that has all it needs. It needs live reads
// twice at most: first of the claims that the cache does not have, then of those that
// would be counted.
func (s *Server) mutatePod(ctx context.Context, r *request) (verdict, error) {
	pod := &rawPod{}
	if err := decode(r.Object, pod); err != nil {
		return verdict{}, badRequest("decoding the pod: %w", err)
	}
	if len(pod.Spec.Volumes) == 0 {
		return verdict{reason: "NoVolumes"}, nil
	}
	if err := s.synced(); err != nil {
		return verdict{}, err // a class that is not there yet would look like one of somebody else
	}
	facts := podFacts{claims: s.cachedClaims(r.Namespace, pod.claimNames()), classes: s.cfg.classesOf(s.deps.Classes.List())}
	const rounds = 3 // unknown claims, counted ones, and the answer
	for range rounds {
		v, err := s.cfg.decidePod(pod, facts)
		if err != nil {
			return verdict{}, badRequest("decoding the pod: %w", err)
		}
		if len(v.read) == 0 {
			return v, nil
		}
		if err := s.readClaims(ctx, r.Namespace, v.read, facts.claims); err != nil {
			return verdict{}, err
		}
	}
	return verdict{}, fmt.Errorf("a pod in namespace %q is not decided after %d rounds", r.Namespace, rounds)
}

func (s *Server) cachedClaims(namespace string, names []string) map[string]claimFact {
	facts := make(map[string]claimFact, len(names))
	for _, name := range names {
		claim, _ := s.deps.Claims.Get(namespace + "/" + name)
		facts[name] = claimFact{claim: claim}
	}
	return facts
}

// maxReads is how many live reads one request makes at the same time: enough for any
// pod that is meant, and not so many that one with thousands of claims is a burden.
const maxReads = 10

// readClaims asks the API server for claims and notes what it says in facts.
func (s *Server) readClaims(ctx context.Context, namespace string, names []string, facts map[string]claimFact) error {
	var (
		mu    sync.Mutex
		wg    sync.WaitGroup
		first error
	)
	slots := make(chan struct{}, maxReads)
	for _, name := range names {
		slots <- struct{}{}
		mu.Lock()
		failed := first != nil
		mu.Unlock()
		if failed {
			break
		}
		wg.Go(func() {
			defer func() { <-slots }()
			claim, err := s.readClaim(ctx, namespace, name)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				first = err
				return
			}
			facts[name] = claimFact{claim: claim, live: true}
		})
	}
	wg.Wait()
	return first
}

// readClaim is nil for a claim that is not there. A panic is an error here: in a
// goroutine of its own it would end the process.
func (s *Server) readClaim(ctx context.Context, namespace, name string) (claim *corev1.PersistentVolumeClaim, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicked(ctx, p)
		}
	}()
	s.metrics.liveReads.Inc()
	claim, err = s.deps.Client.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading PersistentVolumeClaim %q: %w", namespace+"/"+name, err)
	}
	return claim, nil
}

func (s *Server) mutateClaim(ctx context.Context, r *request) (verdict, error) {
	if s.cfg.ClaimFinalizer == "" {
		return verdict{reason: "Off"}, nil
	}
	claim := &rawClaim{}
	if err := decode(r.Object, claim); err != nil {
		return verdict{}, badRequest("decoding the claim: %w", err)
	}
	provisioner, err := s.provisioner(ctx, claim.class())
	if err != nil {
		return verdict{}, err
	}
	return s.cfg.decideClaim(claim, provisioner), nil
}

// provisioner is that of a class, "" where there is none. A class that the cache does
// not have is asked for: claims are often made together with their class.
func (s *Server) provisioner(ctx context.Context, class string) (string, error) {
	if len(validation.IsDNS1123Subdomain(class)) > 0 {
		return "", nil // no class, or a name that none can have
	}
	if cached, ok := s.deps.Classes.Get(class); ok {
		return cached.Provisioner, nil
	}
	s.metrics.liveReads.Inc()
	live, err := s.deps.Client.StorageV1().StorageClasses().Get(ctx, class, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("reading StorageClass %q: %w", class, err)
	}
	return live.Provisioner, nil
}
