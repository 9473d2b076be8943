package webhook

import (
	"context"
	"fmt"

	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// mutatePod gathers and asks decidePod until that has all it needs. Live reads are of the
// claims and classes that the cache does not have, and of the claims that would be counted,
// unless a list for the first ones has told of them, too. No claim and no class is read twice.
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
	// Unknown claims and classes, classes of those claims, those of bound claims once there
	// is something to count, counted claims, their classes if they were made anew, the
	// same of bound ones, and the answer.
	const rounds = 7
	for range rounds {
		v, err := s.cfg.decidePod(pod, facts)
		if err != nil {
			return verdict{}, badRequest("decoding the pod: %w", err)
		}
		if len(v.read) == 0 && len(v.readClasses) == 0 {
			return v, nil
		}
		if len(v.read) > 0 {
			if err := s.readClaims(ctx, r.Namespace, v.read, facts.claims); err != nil {
				return verdict{}, err
			}
		}
		if err := s.readClasses(ctx, v.readClasses, facts.classes); err != nil {
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
	live, err := s.getClass(ctx, class)
	if live == nil || err != nil {
		return "", err
	}
	return live.Provisioner, nil
}

// readClasses asks the API server for the named classes, one after the other: only who
// means harm names many that are not there, and the deadline of the request ends that.
func (s *Server) readClasses(ctx context.Context, names []string, known classes) error {
	for _, name := range names {
		class, err := s.getClass(ctx, name)
		if err != nil {
			return err
		}
		s.cfg.note(known, name, class)
	}
	return nil
}

// getClass is nil for a class that is not there.
func (s *Server) getClass(ctx context.Context, name string) (*storagev1.StorageClass, error) {
	s.metrics.liveReads.Inc()
	class, err := s.deps.Client.StorageV1().StorageClasses().Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading StorageClass %q: %w", name, err)
	}
	return class, nil
}
