package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
)

// connect makes the clients; false when the API server does not answer.
func (e *examination) connect(ctx context.Context) bool {
	const name = "api-server"
	if e.in.Config == nil {
		e.add(name, Failure, "run this in the pod, or set --kubeconfig", "%v", e.in.ConfigError)
		return false
	}
	version, err := e.askVersion(ctx)
	if err != nil {
		e.add(name, Failure, "check the address, the network policy of the pod and the certificate of the API server", "%s does not answer: %v", e.in.Config.Host, err)
		return false
	}
	if e.client, err = kubernetes.NewForConfig(e.in.Config); err == nil {
		e.meta, err = metadata.NewForConfig(e.in.Config)
	}
	if err != nil {
		e.add(name, Failure, "check the kubeconfig", "making the client: %v", err)
		return false
	}
	review, err := e.client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if !e.isAPIServer(ctx, version, review, err) {
		e.add(name, Failure, "check the address, and its path: what answers there is no API server of Kubernetes, or a proxy in front of one", "%s answers, and not as an API server does: %s", e.in.Config.Host, e.version(version))
		return false
	}
	e.report.Reached = true
	switch {
	case apierrors.IsUnauthorized(err):
		e.add(name, Failure, "the token is not valid: is the ServiceAccount there, and is its token mounted?", "%s answers, and does not know who asks: %v", e.in.Config.Host, err)
		return false
	case err != nil:
		e.ok(name, "%s, %s", e.in.Config.Host, e.version(version))
	default:
		e.ok(name, "%s, %s, asked as %s", e.in.Config.Host, e.version(version), review.Status.UserInfo.Username)
	}
	e.checkClock()
	return true
}

// askVersion also takes the time of the API server from its answer.
func (e *examination) askVersion(ctx context.Context) (string, error) {
	client, err := rest.HTTPClientFor(e.in.Config)
	if err != nil {
		return "", err
	}
	address, _, err := rest.DefaultServerUrlFor(e.in.Config)
	if err != nil {
		return "", err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address.JoinPath("/version").String(), nil)
	if err != nil {
		return "", err
	}
	before := time.Now()
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	e.skew = skewOf(response.Header.Get("Date"), before, time.Now())
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		return "", err
	}
	var version struct{ GitVersion string }
	e.said = response.Status
	if response.StatusCode != http.StatusOK || json.Unmarshal(body, &version) != nil {
		return "", nil
	}
	return version.GitVersion, nil
}

// version is what the server said when it was asked for its version.
func (e *examination) version(told string) string {
	if told == "" {
		return fmt.Sprintf("version unknown (/version says %s)", e.said)
	}
	return "version " + told
}

// isAPIServer tells whether one answer at least was what only an API server says: its version, which
// may be hidden, who asks, which those before 1.28 do not tell, that this may not be
// asked, or a review with the question in it.
func (e *examination) isAPIServer(ctx context.Context, version string, who *authenticationv1.SelfSubjectReview, err error) bool {
	if version != "" || err == nil && who.Status.UserInfo.Username != "" || says(err) {
		return true
	}
	ask := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "get", Resource: "nodes"}}}
	review, err := e.client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, ask, metav1.CreateOptions{})
	return err == nil && review.Spec.ResourceAttributes != nil || says(err)
}

// says tells whether err is a refusal in the words of an API server.
func says(err error) bool {
	return (apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

// unknownSkew is that of a server that does not tell its time.
const unknownSkew = time.Duration(-1 << 62)

// skewOf is how far the own clock is ahead of date, which was written between before and
// after and tells whole seconds; 0 while it may be the same time.
func skewOf(date string, before, after time.Time) time.Duration {
	server, err := http.ParseTime(date)
	if err != nil {
		return unknownSkew
	}
	switch {
	case before.After(server.Add(time.Second)):
		return before.Sub(server.Add(time.Second)) // Date cuts the fraction
	case after.Before(server):
		return after.Sub(server)
	}
	return 0
}

// The differences of clocks that are worth a word. Leases only compare times of one
// clock; certificates and tokens do not, and ages in logs and hints mislead.
const (
	clockWarning = 5 * time.Second
	clockFailure = time.Minute
)

func (e *examination) checkClock() {
	e.report.Checks = append(e.report.Checks, clock(e.skew))
	if e.skew == unknownSkew {
		e.skew = 0
	}
}

// clock judges a difference of the clocks.
func clock(skew time.Duration) Check {
	c := Check{Name: "clock", Status: OK, Message: "the same as that of the API server, as far as its answers tell (to a second)"}
	if skew == unknownSkew {
		c.Status, c.Message = Skipped, "the API server does not tell its time"
		return c
	}
	word := "ahead of"
	if skew < 0 {
		word = "behind"
	}
	size := skew.Abs().Round(time.Second)
	if skew.Abs() > clockWarning {
		c.Status, c.Message, c.Hint = Warning, fmt.Sprintf("%v %s that of the API server", size, word), "synchronize the clocks of the nodes (NTP)"
	}
	if skew.Abs() > clockFailure {
		c.Status, c.Hint = Failure, c.Hint+": tokens and certificates are taken for expired, or not valid yet"
	}
	return c
}

// now is the time of the API server.
func (e *examination) now() time.Time { return time.Now().Add(-e.skew) }

// checkAPIs looks whether the kinds are served that roles and features need.
func (e *examination) checkAPIs() {
	for _, a := range e.plan.APIs {
		name := "api " + a.Resource
		served, err := e.serves(a.GroupVersion, a.Resource)
		switch {
		case err != nil:
			e.skip(name, "asking what %s has: %v", a.GroupVersion, err)
		case served:
			e.ok(name, "%s is served, for %s", a.GroupVersion, a.For)
		case a.Required:
			e.add(name, Failure, a.Hint, "%s is not served; %s does not work without it", a.GroupVersion, a.For)
		default:
			e.add(name, Warning, a.Hint, "%s is not served: %s is left out", a.GroupVersion, a.For)
		}
	}
	if e.plan.Capacity {
		e.checkCapacityVersion()
	}
}

func (e *examination) checkCapacityVersion() {
	const name, resource = "api csistoragecapacities", "csistoragecapacities"
	for _, version := range []string{"storage.k8s.io/v1", "storage.k8s.io/v1beta1"} {
		served, err := e.serves(version, resource)
		if err != nil {
			e.skip(name, "asking what %s has: %v", version, err)
			return
		}
		if served {
			e.ok(name, "%s is what will be written, for capacity", version)
			return
		}
	}
	e.add(name, Failure, "use Kubernetes 1.21 or later, or leave capacity out (--enable-capacity=false, --controllers)", "the API server has neither v1 nor v1beta1 of it")
}

func (e *examination) serves(groupVersion, resource string) (bool, error) {
	list, err := e.client.Discovery().ServerResourcesForGroupVersion(groupVersion)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == resource }), nil
}

// names joins some of names, so that a line stays one.
func names(all []string) string {
	const most = 5
	if len(all) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(all[:most], ", "), len(all)-most)
	}
	return strings.Join(all, ", ")
}
