package webhook

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// mutatePod gathers and asks decidePod until that has all it needs. It needs live reads
// twice at most: first of the claims that the cache does not have, then of those that
// would be counted, unless a list for the first ones has told of them, too.
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
