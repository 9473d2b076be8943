package webhook

import (
	"context"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"
)

// The names of a pair in a directory and in a Secret.
const (
	certName = "tls.crt"
	keyName  = "tls.key"
)

// followFiles reads the pair from its directory, again and again. Reading what is there
// sees any way of exchanging it, which the notices of file systems do not: a mounted
// Secret changes by exchanging a symbolic link two levels up.
func (s *Server) followFiles(ctx context.Context) {
	for ctx.Err() == nil {
		pause := s.pace.files
		if !s.loadFiles(ctx) && s.keeper.current.Load() == nil {
			pause = s.pace.missing
		}
		wait(ctx, pause)
	}
}

// loadFiles offers the pair in the directory, and tells whether there is one.
func (s *Server) loadFiles(ctx context.Context) bool {
	cert, err := os.ReadFile(filepath.Join(s.cfg.CertDir, certName))
	var key []byte
	if err == nil {
		key, err = os.ReadFile(filepath.Join(s.cfg.CertDir, keyName))
	}
	if err != nil {
		if s.keeper.missing(err) {
			klog.FromContext(ctx).Info("Waiting for a serving certificate in files", "cause", err.Error())
		}
		return false
	}
	taken, err := s.keeper.offer(cert, key)
	tell(ctx, s.cfg.CertDir, taken, err)
	return true
}
