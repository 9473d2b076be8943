package kubetest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// AuditEvent is one line of the audit log: a completed request, or a watch that was started.
type AuditEvent struct {
	Stage      string `json:"stage"` // ResponseStarted (watches) or ResponseComplete
	Verb       string `json:"verb"`
	UserAgent  string `json:"userAgent"`
	RequestURI string `json:"requestURI"`
	Object     struct {
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Namespace   string `json:"namespace"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	Status struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
	Received time.Time `json:"requestReceivedTimestamp"`
	Answered time.Time `json:"stageTimestamp"`
}

// Resource returns the resource, followed by a slash and the subresource if there is one.
func (r AuditEvent) Resource() string {
	if r.Object.Subresource != "" {
		return r.Object.Resource + "/" + r.Object.Subresource
	}
	return r.Object.Resource
}

// IsWrite reports whether the request modifies objects.
func (r AuditEvent) IsWrite() bool {
	switch r.Verb {
	case "create", "update", "patch", "delete", "deletecollection":
		return true
	}
	return false
}

// AuditOffset returns the current end of the audit log, for [ControlPlane.AuditSince].
func (c *ControlPlane) AuditOffset() (int64, error) {
	info, err := os.Stat(c.auditLog())
	if os.IsNotExist(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

func (c *ControlPlane) auditLog() string { return filepath.Join(c.cfg.Dir, "audit.log") }

// AuditSince returns the events after mark whose user agent begins with agent, in the order of the
// responses. A request is logged before its response is sent.
func (c *ControlPlane) AuditSince(mark int64, agent string) ([]AuditEvent, error) {
	if !c.cfg.Audit {
		return nil, fmt.Errorf("this control plane was started without an audit log")
	}
	f, err := os.Open(c.auditLog())
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, err := f.Seek(mark, io.SeekStart); err != nil {
		return nil, err
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	var records []AuditEvent
	for line := range bytes.Lines(data) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break // an incomplete line
		}
		var r AuditEvent
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("line of the audit log: %w", err)
		}
		if strings.HasPrefix(r.UserAgent, agent) {
			records = append(records, r)
		}
	}
	return records, nil
}
