package webhook

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

const (
	// maxReads is how many live reads one request makes at the same time: enough for any
	// pod that is meant, and not so many that one with thousands of claims is a burden.
	maxReads = 10
	// pageSize is how many claims an answer to a list has at most. The API server
	// weighs a list by this number, and one of a hundred like a single read.
	pageSize = 100
)

// readClaims asks the API server for the named claims and notes what it says in facts,
// perhaps for others that are there, too.
//
// Up to ten are read one by one, at the same time. A list of their namespace would be less
// work, but the API server answers that from its cache, as soon as it knows that nothing
// newer is in etcd: where objects of any kind are written all the time, it finds out only
// ten times a second. More claims than that are listed, if the namespace is not much larger.
func (s *Server) readClaims(ctx context.Context, namespace string, names []string, facts map[string]claimFact) error {
	if len(names) > maxReads && len(s.deps.Claims.ByIndex(kube.ByNamespace, namespace)) <= 10*len(names) {
		return s.listClaims(ctx, namespace, facts)
	}
	return s.getClaims(ctx, namespace, names, facts)
}

// listClaims lists the claims of a namespace. When it returns nil all facts are live.
func (s *Server) listClaims(ctx context.Context, namespace string, facts map[string]claimFact) error {
	found := make(map[string]bool, len(facts))
	options := metav1.ListOptions{Limit: pageSize} // and no resourceVersion: that makes the answer a live one
	for {
		s.metrics.liveReads.Inc()
		page, err := s.deps.Client.CoreV1().PersistentVolumeClaims(namespace).List(ctx, options)
		if err != nil {
			return fmt.Errorf("listing the PersistentVolumeClaims of namespace %q: %w", namespace, err)
		}
		for i := range page.Items {
			claim := &page.Items[i]
			if _, named := facts[claim.Name]; named {
				facts[claim.Name], found[claim.Name] = claimFact{claim: claim, live: true}, true
			}
		}
		if options.Continue = page.Continue; options.Continue == "" {
			break
		}
	}
	for name := range facts {
		if !found[name] {
			facts[name] = claimFact{live: true}
		}
	}
	return nil
}

// getClaims asks for claims one by one, some at the same time.
func (s *Server) getClaims(ctx context.Context, namespace string, names []string, facts map[string]claimFact) error {
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
			claim, err := s.getClaim(ctx, namespace, name)
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

// getClaim is nil for a claim that is not there. A panic is an error here: in a
// goroutine of its own it would end the process.
func (s *Server) getClaim(ctx context.Context, namespace, name string) (claim *corev1.PersistentVolumeClaim, err error) {
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
