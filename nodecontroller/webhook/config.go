package webhook

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// Config is what is set for the webhooks, with all names derived and in full.
type Config struct {
	Driver  string // the provisioner of the classes that count
	Address string // where to listen; the port may be the name of a service
	// DisableHTTP2 leaves HTTP/1.1.
	DisableHTTP2 bool
	// ShutdownDelay is how long requests are still taken after readiness was given up:
	// the API server goes on asking until it has heard of that.
	ShutdownDelay time.Duration

	// ClaimFinalizer is put on the claims of the driver; empty leaves all as they are.
	ClaimFinalizer string

	CapacityResource         string // requested once by each pod with claims that wait for a volume
	CapacityAnnotationPrefix string // with the slash; the device class follows
	DeviceClassParameter     string // of a class
	DefaultDeviceClass       string // of the classes without one
	DefaultVolumeSize        int64  // in bytes, of a claim that names none
	ResolveDefaultClass      bool   // a claim without a class has the default one
	StripForeignCapacity     bool   // annotations under the prefix that were not computed here are removed

	CertMode CertMode
	CertDir  string // for [CertFiles]; empty means the place that tools agree on
	// CertSecret is the Secret of [CertSecret] and [CertSelfSigned], and Service the
	// name under which the API server calls. Both are namespace/name, or a name in
	// OwnNamespace.
	CertSecret   string
	Service      string
	OwnNamespace string
	// ConfigName is the MutatingWebhookConfiguration that is told the authority of
	// [CertSelfSigned].
	ConfigName string
	// ClusterDomain ends the full name of the Service; empty means cluster.local.
	ClusterDomain string
}

// CertMode says where the serving certificate comes from.
type CertMode string

// The sources of the serving certificate.
const (
	CertFiles      CertMode = "files"       // tls.crt and tls.key in a directory
	CertSecret     CertMode = "secret"      // the same in a Secret
	CertSelfSigned CertMode = "self-signed" // the same, made by the leader
)

// Deps is what the program hands to the server. All fields are required.
type Deps struct {
	// Client makes the live reads. A pod waits for them: it should have no rate limit.
	Client kubernetes.Interface
	// Claims must be kept as [kube.RetainedFields] with Claims says: a claim of the driver
	// that waits for its first consumer does not yet say whose it is.
	Claims   kube.Informer[*corev1.PersistentVolumeClaim]
	Classes  kube.Informer[*storagev1.StorageClass]
	Registry prometheus.Registerer
}

// objectName is a namespace and a name in it.
type objectName struct{ namespace, name string }

func (n objectName) String() string { return n.namespace + "/" + n.name }

// nameIn reads namespace/name, or a name in own.
func nameIn(own, text string) (objectName, error) {
	namespace, name, both := strings.Cut(text, "/")
	if !both {
		namespace, name = own, text
	}
	switch {
	case name == "" || strings.Contains(name, "/"):
		return objectName{}, fmt.Errorf("must be namespace/name or a name, got %q", text)
	case namespace == "":
		return objectName{}, fmt.Errorf("%q has no namespace, and the own one is not known: write namespace/name, or set POD_NAMESPACE", text)
	}
	return objectName{namespace, name}, nil
}

// complete fills in the defaults of c.
func (c Config) complete() Config {
	if c.CertDir == "" {
		c.CertDir = filepath.Join(os.TempDir(), "k8s-webhook-server", "serving-certs")
	}
	if c.ClusterDomain == "" {
		c.ClusterDomain = "cluster.local"
	}
	return c
}

// Validate reports everything that is wrong with c, apart from the form of names.
func (c Config) Validate() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.DefaultVolumeSize <= 0 {
		wrong("--default-volume-size: must be positive, got %d", c.DefaultVolumeSize)
	}
	if c.ShutdownDelay < 0 {
		wrong("--shutdown-delay: must not be negative, got %v", c.ShutdownDelay)
	}
	switch c.CertMode {
	case CertFiles:
	case CertSelfSigned:
		if _, err := nameIn(c.OwnNamespace, c.Service); err != nil {
			wrong("--webhook-service: %w", err)
		}
		if c.ConfigName == "" {
			wrong("--webhook-config-name: needed for --webhook-cert-mode=%s", c.CertMode)
		}
		fallthrough
	case CertSecret:
		if _, err := nameIn(c.OwnNamespace, c.CertSecret); err != nil {
			wrong("--webhook-cert-secret: %w", err)
		}
	default:
		wrong("--webhook-cert-mode: must be %s, %s or %s, got %q", CertFiles, CertSecret, CertSelfSigned, c.CertMode)
	}
	return errors.Join(errs...)
}

// serviceNames is all names under which the Service s is called.
func (c Config) serviceNames(s objectName) []string {
	base := s.name + "." + s.namespace
	return []string{s.name, base, base + ".svc", base + ".svc." + c.ClusterDomain}
}
